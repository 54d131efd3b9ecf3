"""Stores on servers under inspection: what `kvtier fsck`, `ls`, `du` and `gc` read and repair."""

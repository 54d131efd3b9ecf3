"""Stores on disk under inspection: what `kvtier fsck`, `ls`, `du` and `gc` read and repair; no open tier loads it."""

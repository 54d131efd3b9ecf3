"""The slab layout: slots in a few large files on local disks, owned by one process."""

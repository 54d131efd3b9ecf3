"""The tier `fs`, layout `slab`: slots in a few large files; a root is touched by the process that owns it alone."""

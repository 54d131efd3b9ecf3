"""The `files` layout: one file a block, for shared and network file systems. See `docs/format-files.md`."""

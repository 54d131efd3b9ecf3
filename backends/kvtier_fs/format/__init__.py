"""Every byte layout on disk, encoded and decoded; no I/O; imported by the rooms above. Reference: docs/format.md."""

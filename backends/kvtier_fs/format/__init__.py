"""Every byte layout on disk, encoded and decoded. `docs/format.md` is the reference."""

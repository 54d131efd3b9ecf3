"""The tier `shared_fs`, layout `files` (docs/format-files.md): a file a block; many processes touch it, with locks."""

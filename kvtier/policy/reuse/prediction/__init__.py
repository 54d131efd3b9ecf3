"""Statistics of a stack's requests: when blocks of a prompt are used again; touched by `reuse` and its admission."""

"""Statistics of the requests of a stack: when the blocks of a prompt are used again."""

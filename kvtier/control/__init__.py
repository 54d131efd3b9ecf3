"""The control plane: decides where blocks are; no I/O, clock or randomness; touched by one thread of the stack."""

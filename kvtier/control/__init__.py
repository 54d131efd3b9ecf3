"""The control plane: a deterministic state machine without I/O, clock or randomness of its own."""

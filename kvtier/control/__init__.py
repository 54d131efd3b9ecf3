"""The control plane with its state, jobs and reservations: decides where blocks are; no I/O or clock; one thread."""

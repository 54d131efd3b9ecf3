"""Request traces: requests and keys, readers, a recorder; the stack feeds the recorder, which touches no blocks."""

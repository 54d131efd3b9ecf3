"""Request traces: reading and recording them; the recorder gets requests from the stack and touches no blocks."""

"""I/O engines: the contract, and one file for each way; called on the event loop, touch buffers in flight and files."""

"""I/O engines: the contract, and one file for each way to do it."""

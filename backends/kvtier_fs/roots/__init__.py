"""The parts of a root that both layouts need: its folder, disk, readable files, I/O engine, and the jobs on it."""

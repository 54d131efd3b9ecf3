"""What both layouts need on a root: its folder, its disk, its readable files, its I/O engine, the jobs on it."""

"""The parts of a root that both layouts need: folder, checks of its disk, order of open and close; no blocks."""

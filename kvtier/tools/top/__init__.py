"""The parts of `kvtier top`: sources of figures, rows of a table, the screen and its keys; reads only."""

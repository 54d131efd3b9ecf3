"""What `kvtier top` is made of: sources of figures, rows of a table, the screen and its keys."""

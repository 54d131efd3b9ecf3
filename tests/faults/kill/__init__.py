"""The kill harness: real stores on real files, killed with SIGKILL at random moments and opened again.

`board` is the memory that victims write into and that outlives them, `world` a root and what is stored in it, `life`,
`slab_life` and `files_life` what a victim does, `victim` the process it does it in, `oracle` what may come back,
`damage` what the harness does to the files between two lives, `cycles` all of it again and again.
"""

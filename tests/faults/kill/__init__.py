"""The kill harness: real stores on real files, killed with SIGKILL at random moments and opened again.

`board` is the memory that victims write into and that outlives them, `world` a root and what is stored in it, `life`,
`slab_life` and `files_life` what a victim does, `victim` the process it does it in, `warming` what is done before the
first of them is forked, `oracle` what may come back, `damage` and `files_damage` what the harness does to the files
between two lives, `cycles` all of it again and again. `late`, `stale`, `steps`, `power` and `shared_region` (on a
`slow_disk`) are rows of their own. `python -m tests.faults.kill` runs one row in a lean process.
"""

"""The kill harness: real stores on real files, killed with SIGKILL at random moments and opened again.

`shared_log` is the memory that victims write into and that survives them, `world` a root and what is stored in it,
`life`, `slab_life` and `files_life` what a victim does between start and death, `victim` the process it does it in,
`warming` what is done before the first of them is forked, `oracle` what may come back, `damage` and `files_damage` what
the harness does to the files between two lives, `cycles` the repetition of all that. `late`, `stale`, `steps` and
`power` are rows of their own. `python -m faults.kill` runs one row in a lean process.
"""

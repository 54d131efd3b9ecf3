"""Real faults of the operating system, each undone whatever happens: small disks, errors, freezing, throttles, filters.

Everything is done in a mount namespace of this process, so mounts end with it; what outlives a process is written down
before it is done and undone by a guard if the process cannot do it itself (`undo`).
"""

"""The engine's end of a stack process: what a synchronous engine calls, and what its workers copy.

`core` has the state and no I/O; `worker` maps the rows and copies; `engine` joins both to sockets.
"""

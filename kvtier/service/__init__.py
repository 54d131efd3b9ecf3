"""The stack as a process: messages between it and the engines that it serves.

`wire` and `channel` are used by both ends, so they import nothing of control and stack. A message is decided by one
thread of each end; nothing here waits.
"""

"""Waiting for a descriptor in a thread. `select` takes none above 1,023, and a program may have many files open."""

import select


def wait_readable(fd: int, timeout_seconds: float) -> bool:
    """Wait until a descriptor has something to read, or its other end has closed. False once the time is over."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(max(0.0, timeout_seconds) * 1e3))

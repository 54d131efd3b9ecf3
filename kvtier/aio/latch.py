"""Waiting for another thread, safe against exceptions that signal handlers raise in the waiting one."""

import threading


class Latch:
    """Set by one thread, waited for by another; `wait` and `clear` reset it.

    A `threading.Event` takes a lock in Python code: its waiter, interrupted at the wrong moment by an exception of a
    signal handler, keeps that lock, and the thread that sets the event hangs. Here each step is one call in C.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def set(self) -> None:
        """Let one wait end, this or the next. From any thread; idempotent."""
        try:
            self._lock.release()
        except RuntimeError:  # it was set
            return

    def clear(self) -> None:
        """Forget that it was set."""
        self._lock.acquire(blocking=False)

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """True when it was set, False once the time is over."""
        return self._lock.acquire(timeout=-1 if timeout_seconds is None else max(0.0, timeout_seconds))

"""A stack belongs to the process that opened it: its threads, rings and queues do not live in a forked child."""

import os
from typing import ClassVar

from kvtier.errors import UsageError


class ProcessGuard:
    """The process that opened a stack; none until `claim`.

    What a child inherits by a fork is the parent's: locks and descriptors are shared with it, and threads are missing.
    So nothing of a stack may be used there, and closing must not touch what it shares. A child forked in a coroutine
    shares the event loop's descriptors too and has to leave by `os._exit` or exec, as asyncio demands; multiprocessing
    does.
    """

    _here: ClassVar[int] = os.getpid()
    """The id of this process. A step of an engine asks for it several times, and a system call takes microseconds."""

    def __init__(self) -> None:
        self._pid = 0

    @classmethod
    def note_fork(cls) -> None:
        """In a child, right after the fork."""
        cls._here = os.getpid()

    def claim(self) -> None:
        """This process is the owner from now on."""
        self._pid = self._here

    @property
    def elsewhere(self) -> bool:
        """True in a child that was forked from the owner."""
        return self._pid not in (0, self._here)

    def check(self) -> None:
        """Raise UsageError in a forked child."""
        if self._pid != self._here and self._pid:
            raise UsageError(
                f"the stack belongs to process {self._pid}, and this is process {self._here}, forked from it: "
                f"open a stack of its own after the fork, in folders of its own"
            )


os.register_at_fork(after_in_child=ProcessGuard.note_fork)

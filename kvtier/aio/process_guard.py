"""The guard of a stack against use in a forked child, which has none of its threads, rings and queues."""

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

    here: ClassVar[int] = os.getpid()
    """The id of this process. A step of an engine asks for it several times, and a system call takes microseconds."""

    def __init__(self) -> None:
        self.pid = 0

    @classmethod
    def note_fork(cls) -> None:
        """Take over the id of a child, right after the fork."""
        cls.here = os.getpid()

    def claim(self) -> None:
        """This process is the owner from now on."""
        self.pid = self.here

    @property
    def is_forked_child(self) -> bool:
        """True in a child that was forked from the owner."""
        return self.pid not in (0, self.here)

    def check(self) -> None:
        """Raise UsageError in a forked child."""
        if self.pid != self.here and self.pid:
            raise UsageError(
                f"the stack belongs to process {self.pid}, and this is process {self.here}, forked from it: "
                f"open a stack of its own after the fork, in folders of its own"
            )


os.register_at_fork(after_in_child=ProcessGuard.note_fork)

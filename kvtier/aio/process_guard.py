"""A stack belongs to the process that opened it: its threads, rings and queues do not live in a forked child."""

import os

from kvtier.errors import UsageError


class ProcessGuard:
    """The process that opened a stack; none until `claim`.

    What a child inherits by a fork is the parent's: locks and descriptors are shared with it, and threads are missing.
    So nothing of a stack may be used there, and closing must not touch what it shares. A child forked in a coroutine
    shares the event loop's descriptors too and has to leave by `os._exit` or exec, as asyncio demands; multiprocessing
    does.
    """

    def __init__(self) -> None:
        self._pid = 0

    def claim(self) -> None:
        """This process is the owner from now on."""
        self._pid = os.getpid()

    @property
    def elsewhere(self) -> bool:
        """True in a child that was forked from the owner."""
        return self._pid not in (0, os.getpid())

    def check(self) -> None:
        """Raise UsageError in a forked child."""
        if self._pid != os.getpid() and self._pid:
            raise UsageError(
                f"the stack belongs to process {self._pid}, and this is process {os.getpid()}, forked from it: "
                f"open a stack of its own after the fork, in folders of its own"
            )

"""The base of tests of a transport: the hooks a subclass supplies, and an open transport of it."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any, ClassVar, Concatenate, ParamSpec, TypeVar

from kvtier.testing.trace import leaving_no_trace, run_in_loop
from kvtier_remote.conformance.client import Client
from kvtier_remote.transport import Transport, ValueRef

P = ParamSpec("P")
Suite = TypeVar("Suite", bound="TransportBase")
CLOSE_SECONDS = 20.0


class TransportBase(ABC):
    """The hooks. `make` is required; the rest has defaults.

    Every test has a place of its own, and names that no other test has. There must be room for 64 MiB of values.
    """

    sizes: ClassVar[Sequence[int]] = (1, 64, 5000, 256 << 10, (1 << 20) + 512)
    """Payload bytes of values."""

    races_end_at_once: ClassVar[bool] = True
    """False if two clients that replace one marker at the same time may both get their own for an answer. One of them
    is there, and the next call of the other returns that."""

    call_seconds: ClassVar[float] = 60.0
    """A call ends within this time while the server is frozen."""

    _warm: ClassVar[bool] = False

    @abstractmethod
    def make(self, place: Path) -> Transport:
        """A new transport, not open. `place` is a path of this test alone; all transports for it use one server."""

    def make_unreachable(self, place: Path) -> Transport | None:
        """A transport to where no server is. None: there is no such case."""
        return None

    def make_hurried(self, place: Path) -> Transport:
        """A transport with short timeouts, for a server that is frozen."""
        return self.make(place)

    def frozen(self) -> AbstractContextManager[None] | None:
        """A context in which the server does not answer. None: it cannot be frozen."""
        return None

    def one_silent(self) -> AbstractContextManager[str] | None:
        """A context in which one of several servers does not answer, and what `server_of` calls it. None: there are
        not several, or none can be silenced."""
        return None

    def lose_markers(self, place: Path) -> bool:
        """Remove every marker from the server. Return True if that was done."""
        return False

    # -- for the tests ---------------------------------------------------------------------------------------------

    def warm_up(self) -> None:
        """Open and close a transport once for all tests of a class."""
        if not type(self)._warm:
            run_in_loop(self._life(Path("warm-up")))
            type(self)._warm = True

    async def _life(self, place: Path) -> None:
        async with self.client(place):
            pass

    @asynccontextmanager
    async def client(self, place: Path, transport: Transport | None = None) -> AsyncIterator[Client]:
        """A transport, open; closed at the end, with nothing stuck."""
        one = transport or self.make(place)
        try:
            await one.open()
            yield Client(one, str(place))
        finally:
            assert await one.close(CLOSE_SECONDS) == 0, "calls are stuck"

    def places(self, client: Client, per_size: int = 2) -> list[ValueRef]:
        """Places of every size."""
        numbers = count()
        return [client.place(next(numbers), size) for size in self.sizes for _ in range(per_size)]


def in_loop(test: Callable[Concatenate[Suite, P], Coroutine[Any, Any, None]]) -> Callable[Concatenate[Suite, P], None]:
    """An event loop for each test, which must leave no descriptor, thread or task; a library may keep what it has
    after the first transport of a class was open."""

    @functools.wraps(test)
    def run(suite: Suite, /, *args: P.args, **kwargs: P.kwargs) -> None:
        suite.warm_up()
        with leaving_no_trace():
            run_in_loop(test(suite, *args, **kwargs))

    return run

"""The protocol of a remote engine: one of few calls over named values, and no more.

A value is a header and a payload. `kvtier_remote.backend` makes both, verifies what comes back and decides what an
outcome means; a transport moves bytes under names.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

from kvtier.tier.shared_epoch import Marker as Marker
from kvtier.types.jobs import BlockOutcome
from kvtier_remote.call_limit import CompletionDelay


class NameFormat(NamedTuple):
    """The form of an engine's names. So many first digits of a key are a part of their own, before the rest:
    an object store spreads its load by how names begin."""

    separator: str = ":"
    fan_out: int = 0


class ValueRef(NamedTuple):
    """The place of a value, and its size: `header_bytes` and `payload_bytes` are known before it is read."""

    name: str
    header_bytes: int
    payload_bytes: int


class Value(NamedTuple):
    """A value to write, or room to read one into. `payload` is memory of a row; `header` is empty for a read."""

    place: ValueRef
    payload: memoryview
    header: bytes = b""


MANIFEST_BYTES_MAX = 16 << 10


@dataclass(frozen=True, slots=True)
class TransportInfo:
    """The facts of an open transport. `capacity_bytes` is what the server keeps at most; `notes` are for people to
    read.

    `flight_bytes`: payload bytes in flight at once, at most, where more of them would only wait in the server; several
    times as many while the calls of a transport that `ReportsLateness` wait for this process. `look_up_before_store`
    and `probe_prefix` are those of the tier's `Opened`.
    """

    capacity_bytes: int
    notes: tuple[str, ...] = ()
    flight_bytes: int = sys.maxsize
    look_up_before_store: bool = False
    probe_prefix: bool = False


Verify = Callable[[int, memoryview], BlockOutcome]
"""Given the position of a read and the header as it arrived, while the payload is in its row: LOADED or CORRUPT."""


class Transport(Protocol):
    """A remote engine. Every call ends within a bound of its own, whatever the server does, and names at least one
    value. `kvtier_remote.conformance` holds an engine to this.

    A call that moves values returns one outcome for each, and raises nothing for bad luck: LOADED, MISSING, CORRUPT
    (another length); STORED, dropped (disk_full); failed with an errno. The other calls raise OSError.

    A call makes one attempt, and a library's own retries are turned off: the tier repeats what may be repeated, within
    a job's deadline and a budget. The errno says which that is: EBUSY, the server asks for fewer requests (429, 503);
    ECONNRESET, the connection was cut. After EBUSY and ETIMEDOUT fewer calls are made at once.

    The memory of a `Value` is in use until `get` or `put` returns and never after; neither is cancelled by its caller,
    but for the gets of a transport that `hedges`.
    """

    @property
    def name_format(self) -> NameFormat:
        """The form of the names it is given."""

    @property
    def batch_blocks(self) -> int:
        """Values in one `get` or `put`, at most."""

    @property
    def batch_bytes(self) -> int:
        """Payload bytes in one `get` or `put` of more than one value, at most."""

    @property
    def concurrency(self) -> int:
        """Calls of `get` and `put` that are worth having in flight at once."""

    @property
    def hedges(self) -> bool:
        """True if a slow `get` of one value is worth a second one beside it, the slower of which is cancelled: a
        cancelled `get` raises CancelledError once its memory is no longer in use, and that is soon. `batch_blocks` is 1
        then."""

    async def open(self) -> TransportInfo:
        """Connect. Raises ConfigError with the key to correct, or ResourceError; `close` releases what was taken."""

    async def present(self, places: Sequence[ValueRef]) -> Sequence[bool | None]:
        """True for each value that is there with the right length. Of several servers some may not answer: None for
        the values that they have. OSError if none does."""

    async def get(self, values: Sequence[Value], verify: Verify) -> list[BlockOutcome]:
        """Read values into their payloads. `verify` is called from any thread for each that arrived whole."""

    async def put(self, values: Sequence[Value]) -> list[BlockOutcome]:
        """Write values, each over the one of its name."""

    async def remove(self, places: Sequence[ValueRef]) -> None:
        """Remove values; those that are not there are none of its business."""

    async def read_marker(self, name: str) -> Marker | None:
        """The marker that is there; None if there is none. What states an epoch from `EPOCH_CEILING` on is none."""

    async def swap_marker(self, name: str, held: Marker | None, marker: Marker) -> Marker | None:
        """Put `marker` in place of `held`; None: in place of nothing, or of what is no marker. Where another one is
        there by now, nothing happens.

        Atomic among all clients. Returns what is there now.
        """

    async def close(self, timeout_seconds: float) -> int:
        """End the calls in flight and disconnect. Returns how many calls are stuck at the deadline. Idempotent."""


@runtime_checkable
class Sharded(Protocol):
    """A transport over several servers, each of which has some of the names. The values of one `get` or `put` are those
    of one server, so that another one, which does not answer, costs them nothing."""

    def server_of(self, place: ValueRef) -> str:
        """An id of the server that has a value."""


@runtime_checkable
class ReportsLateness(Protocol):
    """A transport that makes its calls on threads, so that they may wait for this process and not for the server."""

    @property
    def lateness(self) -> CompletionDelay:
        """The delay of the event loop after the ends of calls."""


@runtime_checkable
class StoresManifest(Protocol):
    """A transport that keeps a readable text beside the values, for people and for `kvtier du`."""

    async def describe(self, name: str, text: str) -> None:
        """Write a text of a few KiB under a name, unless there is one. Raises OSError."""


@runtime_checkable
class KeepsLeases(Protocol):
    """A transport that keeps a note on the server that a marker is in use, which ends by itself."""

    lease_seconds: float
    """Seconds that it stays after it was written."""

    async def keep_lease(self, marker: str, lease: str) -> None:
        """Write the note of this name, and use the marker, so that a server that evicts by use keeps it. Raises
        OSError."""


@runtime_checkable
class CountsEvictions(Protocol):
    """A transport whose server evicts by itself, and says how often."""

    async def evicted(self) -> int:
        """Names that the server has evicted since it started, of all who store there. Raises OSError."""

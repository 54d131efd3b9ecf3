"""The protocol of an engine for the tools: listing, reading and removing values by name. Every call blocks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set, Sized
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from kvtier.errors import RootError
from kvtier_remote.names import BlockName
from kvtier_remote.transport import Marker

NAMESPACES_MAX = 1 << 17
_NAME_SHOWN = 200


def shown_name(name: str) -> str:
    """A name that servers state, as it can be printed."""
    return ascii(name[:_NAME_SHOWN])[1:-1]


def check_namespaces(address: str, namespaces: Sized) -> None:
    """Raises RootError for more namespaces than a listing keeps in memory."""
    if len(namespaces) > NAMESPACES_MAX:
        raise RootError(address, f"the server states more than {NAMESPACES_MAX} namespaces")


class Listed(NamedTuple):
    """A value as a listing finds it. `name` is None for a name below the prefix that is no block's.

    `whole` is false if a part of it is missing, so that no lookup finds it. `shown` is the name as it can be printed,
    `parts` are all names to remove. `stored_at`: seconds since 1970; None if that cannot be known.
    """

    name: BlockName | None
    shown: str
    parts: Sequence[bytes | str] = ()
    whole: bool = True
    payload_bytes: int = 0
    stored_bytes: int = 0
    stored_at: float | None = None


@dataclass(frozen=True, slots=True)
class About:
    """An engine's store as a whole: its address, and how many `parts` (nodes, folders) it is spread over."""

    address: str
    layout: str
    regions: int
    parts: str


class Listing(Protocol):
    """The names below one prefix. Memory is bounded: a listing comes in pages. Every call may raise RootError."""

    @property
    def about(self) -> About:
        """The store as a whole."""

    def pages(self) -> Iterator[Sequence[Listed]]:
        """Every value, a page at a time. What is stored or removed meanwhile may be missed or come twice."""

    def markers(self) -> Mapping[bytes, Marker]:
        """The markers that count, by the front of their namespace's digest."""

    def marker(self, namespace: bytes) -> Marker | None:
        """The marker of one namespace as it is now."""

    def leases(self) -> Set[tuple[bytes, Marker]]:
        """The markers, with the front of their namespace's digest, that open processes use."""

    def manifests(self, namespaces: Iterable[bytes]) -> Mapping[bytes, str]:
        """The manifests of those of the namespaces that have one."""

    def read(self, values: Sequence[Listed]) -> Iterator[memoryview | None]:
        """Each value, its header and its payload; None for one that is gone. Few are in memory at a time."""

    def remove(self, values: Sequence[Listed]) -> None:
        """Remove values."""

    def forget(self, namespace: bytes) -> None:
        """Remove what describes a namespace."""

    def close(self) -> None:
        """Disconnect. Idempotent."""

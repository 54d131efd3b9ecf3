"""A store on a server for `kvtier fsck`, `ls`, `du` and `gc`: read, repaired and pruned beside its users."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, NamedTuple, Protocol

from kvtier.errors import ConfigError, RootError
from kvtier.options import TierOptions
from kvtier.tier.block_envelope import (
    COUNTER_LIMIT,
    KEY_AT,
    Mismatch,
    decode_slot_header,
    first_difference,
    is_other_version,
    key_fault,
    page_fault,
    stated_generation,
    stated_length,
)
from kvtier.tier.checksum import checksum
from kvtier.tier.inspection import (
    Access,
    BlockState,
    CheckStep,
    StoreAbout,
    StoredBlock,
    StoredNamespace,
    read_manifest,
)
from kvtier.tier.store_inspection import CheckedPage, Page, StoreInspection
from kvtier_remote.names import BlockName, StoreNames, key_digest, namespace_of
from kvtier_remote.transport import Marker
from kvtier_remote.value import HEADER_BYTES_MAX, root_of

_NAMESPACES_MAX = 1 << 17
_NAME_SHOWN = 200
_NANOSECONDS = 1_000_000_000
_SHARED = "others may store and remove while this is read; what changes meanwhile may be missed, or counted twice"


def shown_name(name: str) -> str:
    """A name that servers state, as it can be printed."""
    return ascii(name[:_NAME_SHOWN])[1:-1]


def about_server(address: str, layout: str, regions: int, parts: str) -> StoreAbout:
    """A store of so many parts, whose number of values is not known before they are listed."""
    return StoreAbout(address, layout, identity="", slots=None, regions=regions, parts=parts)


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


class Listing(Protocol):
    """The names below one prefix. Memory is bounded: a listing comes in pages. Every call blocks, and may raise
    RootError."""

    names: StoreNames

    @property
    def about(self) -> StoreAbout:
        """The store as a whole, without namespaces and notes; its parts are nodes or folders."""

    def pages(self) -> Iterator[Sequence[Listed]]:
        """Every value, a page at a time. What is stored or removed meanwhile may be missed or come twice."""

    def starting(self, prefix: str) -> Iterator[Sequence[str]]:
        """All names that begin so, a page at a time."""

    def marker(self, namespace: bytes) -> Marker | None:
        """The marker of one namespace as it is now."""

    def leases(self) -> Set[tuple[bytes, Marker]]:
        """The markers, with the front of their namespace's digest, that open processes use."""

    def manifest(self, name: str) -> bytes:
        """The manifest of this name; empty if there is none."""

    def read(self, values: Sequence[Listed]) -> Iterator[memoryview | None]:
        """Each value, its header and its payload; None for one that is gone. Few are in memory at a time."""

    def remove(self, names: Sequence[bytes | str]) -> None:
        """Remove what has these names."""

    def close(self) -> None:
        """Disconnect. Idempotent."""


@dataclass(frozen=True, slots=True, eq=False)
class ListedValue:
    """A value as it was listed; `block` is None for one under a name that is no block's."""

    listed: Listed
    block: StoredBlock | None


class RemoteInspection(StoreInspection[ListedValue]):
    """The values below one prefix under inspection, whatever the engine. Other processes use them at the same time.
    Those of another version of the envelope, which another release stores, are neither counted nor changed.

    A block counts if its name has the incarnation and the epoch of its namespace's marker: a process that opens now
    finds no other. Those under another marker count too while an open process leases that.
    """

    def __init__(self, listing: Listing) -> None:
        """Takes the listing over: it is closed with this, and if this cannot be made. Raises RootError."""
        self._listing = listing
        self._looked_up: set[tuple[bytes, Marker]] = set()
        try:
            self._leases = listing.leases()
            self._markers = self._read_markers()
            self.about = replace(listing.about, namespaces=tuple(self._namespaces()), notes=(_SHARED,))
        except BaseException:
            listing.close()
            raise

    def close(self) -> None:
        """Disconnect. Idempotent."""
        self._listing.close()

    def _refusal(self, error: OSError) -> RootError:
        return RootError(self.about.root, str(error.strerror))

    def _pages(self) -> Iterator[Page[ListedValue]]:
        numbers = count()
        for page in self._listing.pages():
            others = {one.name.namespace for one in page if one.name is not None and one.name.is_other_version}
            named = [one for one in page if one.name is None or not one.name.is_other_version]
            values = [ListedValue(one, self._block(one, numbers)) for one in named]
            yield Page(len(page), values, others)

    def _check_pages(self, repair: bool) -> Iterator[CheckedPage[ListedValue]]:
        """Every value that counts is read; what a load verifies is verified."""
        for page in self._pages():
            current = [one for one in page.contents if one.block is not None and one.block.state is BlockState.CURRENT]
            others = [
                (one, "") for one in page.contents if one.block is None or one.block.state is not BlockState.CURRENT
            ]
            yield CheckedPage(CheckStep(slots=len(others)), others)
            for one, value in zip(current, self._listing.read([one.listed for one in current]), strict=True):
                assert one.listed.name is not None
                if value is None or is_other_version(value):
                    yield CheckedPage(CheckStep(slots=1, empty=1))
                elif fault := fault_of(one.listed.name, value):
                    yield CheckedPage(CheckStep(slots=1), [(one, fault)])
                else:
                    yield CheckedPage(CheckStep(slots=1, whole=1, payload_bytes=one.listed.payload_bytes))

    def _place_in_words(self, one: ListedValue) -> str:
        return one.listed.shown

    def _remove(self, contents: Sequence[ListedValue], must: bool) -> set[ListedValue]:
        self._listing.remove([part for one in contents for part in one.listed.parts])
        return set(contents)

    def _sync(self) -> None:
        """A server keeps its own promises about what was removed."""

    def _forget(self, namespace: bytes) -> None:
        self._listing.remove([self._listing.names.manifest(namespace)])

    def _block(self, one: Listed, numbers: Iterator[int]) -> StoredBlock | None:
        name = one.name
        if name is None:
            return None
        return StoredBlock(
            state=self._state(name) if one.whole else BlockState.ORPHANED,
            namespace=name.namespace,
            group=None,
            key=name.key,
            region=0,
            slot=next(numbers),
            generation=0 if one.stored_at is None else int(one.stored_at * _NANOSECONDS),
            payload_bytes=one.payload_bytes,
            stored_bytes=one.stored_bytes,
            stored_at=one.stored_at,
            epoch=name.marker.epoch,
        )

    def _state(self, name: BlockName) -> BlockState:
        """A marker that does not fit is read again, once for each that names have: it may be new, or raised since."""
        marker, asked = self._markers.get(name.namespace), (name.namespace, name.marker)
        if asked in self._leases:
            return BlockState.CURRENT
        if marker != name.marker and asked not in self._looked_up:
            self._looked_up.add(asked)
            marker = self._listing.marker(name.namespace)
            if marker is not None:
                self._markers[name.namespace] = marker
        if marker == name.marker:
            return BlockState.CURRENT
        counted_on = marker is not None and marker.lineage == name.marker.lineage and marker.epoch > name.marker.epoch
        return BlockState.OLD if counted_on else BlockState.ORPHANED

    def _read_markers(self) -> dict[bytes, Marker]:
        """The markers that count, by the front of their namespace's digest. Raises RootError if they are too many."""
        prefix, digests = self._listing.names.markers, set[bytes]()
        for names in self._listing.starting(prefix):
            each = (namespace_of(name.removeprefix(prefix).partition("/")[0]) for name in names)
            digests.update(digest for digest in each if digest is not None)
            if len(digests) > _NAMESPACES_MAX:
                reason = f"the server states more than {_NAMESPACES_MAX} namespaces"
                raise RootError(self._listing.about.root, reason)
        found = {digest: self._listing.marker(digest) for digest in digests}
        return {digest: marker for digest, marker in found.items() if marker is not None}

    def _namespaces(self) -> Iterator[StoredNamespace]:
        for digest, marker in sorted(self._markers.items()):
            manifest = self._listing.manifest(self._listing.names.manifest(digest))
            yield StoredNamespace(digest, marker.epoch, None, None, *read_manifest(manifest))


@dataclass(frozen=True, slots=True)
class ServerInspector:
    """The inspector of one type of server. See `kvtier.tier.inspection.InspectsServers`.

    `of_place` makes the options of what stands between scheme and prefix of an address; `listing` connects.
    """

    schemes: tuple[str, ...]
    of_place: Callable[[str], dict[str, Any]]
    listing: Callable[[Any], Listing]

    def address_options(self, address: str) -> dict[str, Any] | None:
        """The options of a tool at an address such as `s3://bucket/prefix`: it waits longer than a tier and stores
        nothing."""
        scheme, _, rest = address.partition("://")
        if scheme not in self.schemes:
            return None
        if "@" in rest:
            raise ConfigError("an address holds no user and no password; name their files by -o KEY=VALUE")
        place, _, prefix = rest.partition("/")
        options = {"allow_unbounded": True, "request_timeout_seconds": 20, "job_timeout_seconds": 60}
        return self.of_place(place) | options | ({"prefix": prefix} if prefix else {})

    def inspect_server(self, options: TierOptions, access: Access) -> RemoteInspection:
        """The store of a tier of these options. Raises ConfigError and RootError."""
        return RemoteInspection(self.listing(options))


# -- values ----------------------------------------------------------------------------------------------------------


def stated_header_bytes(front: memoryview) -> int:
    """The length of the header that a value begins with, as it says itself; 0 if it is none."""
    length = stated_length(front)
    return length if KEY_AT <= length <= HEADER_BYTES_MAX else 0


def stated_time(front: memoryview) -> float | None:
    """The time of a value's store, in seconds since 1970, from its header; None if it is none."""
    if not stated_header_bytes(front):
        return None
    generation = stated_generation(front)
    return generation / _NANOSECONDS if generation < COUNTER_LIMIT else None


def fault_of(name: BlockName, value: memoryview) -> str:
    """The fault of a value that was found under a name; empty if a load would take it."""
    page = value[: stated_header_bytes(value)]
    header = decode_slot_header(page)
    if header is None:
        return page_fault(page or value[:HEADER_BYTES_MAX]) or Mismatch.VERSION
    payload = value[len(page) :]
    expected = header._replace(
        namespace=name.namespace + header.namespace[len(name.namespace) :],
        epoch=name.marker.epoch,
        root_uuid=root_of(name.marker),
        region=0,
        slot_index=0,
        region_generation=0,
        slot_bytes=len(value),
        payload_bytes=len(payload),
    )
    fault = first_difference(header, expected) or key_fault(header)
    if fault or key_digest(header.key) != name.key:
        return fault or Mismatch.KEY
    return "" if checksum(payload) == header.payload_digest else Mismatch.PAYLOAD

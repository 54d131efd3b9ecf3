"""A store on a server for `kvtier fsck`, `ls`, `du` and `gc`: read, repaired and pruned beside its users."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from kvtier.errors import ConfigError
from kvtier.options import TierOptions
from kvtier.tier.block_envelope import is_other_version
from kvtier.tier.inspection import (
    Access,
    BlockState,
    CheckStep,
    Finding,
    FindingKind,
    ListStep,
    StoreAbout,
    StoredBlock,
    StoredNamespace,
    leftover,
    read_manifest,
)
from kvtier_remote.inspect.judge import fault_of
from kvtier_remote.inspect.listing import About, Listed, Listing
from kvtier_remote.names import BlockName
from kvtier_remote.transport import Marker

_NANOSECONDS = 1_000_000_000
_SHARED = "others may store and remove while this is read; what changes meanwhile may be missed, or counted twice"


class RemoteInspection:
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
            self._markers = dict(listing.markers())
            self.about = self._about(listing.about)
        except BaseException:
            listing.close()
            raise

    def _about(self, facts: About) -> StoreAbout:
        return StoreAbout(
            root=facts.address,
            layout=facts.layout,
            identity="",
            slots=None,
            regions=facts.regions,
            namespaces=self._namespaces(),
            notes=(_SHARED,),
            parts=facts.parts,
        )

    def close(self) -> None:
        """Disconnect. Idempotent."""
        self._listing.close()

    def blocks(self) -> Iterator[ListStep]:
        """Every value that has the name of a block, in the engine's order. Payloads are not read."""
        for values, blocks in self._pages():
            yield ListStep(len(values), [block for block in blocks if block is not None])

    def check(self, repair: bool) -> Iterator[CheckStep]:
        """Read every value that counts, and verify what a load verifies. Repair removes what is damaged."""
        for values, blocks in self._pages():
            current, findings = [], []
            for one, block in zip(values, blocks, strict=True):
                if block is not None and block.state is BlockState.CURRENT:
                    current.append(one)
                elif not _is_other_version(one):
                    findings.append(_leftover(one, block))
            yield CheckStep(slots=len(findings), findings=findings)
            yield from self._verify(current, repair)

    def _verify(self, values: Sequence[Listed], repair: bool) -> Iterator[CheckStep]:
        for one, value in zip(values, self._listing.read(values), strict=True):
            assert one.name is not None
            if value is None or is_other_version(value):
                yield CheckStep(slots=1, empty=1)
            elif fault := fault_of(one.name, value):
                if repair:
                    self._listing.remove([one])
                yield CheckStep(slots=1, findings=[Finding(FindingKind.CORRUPT, fault, one.shown, repair)])
            else:
                yield CheckStep(slots=1, whole=1, payload_bytes=one.payload_bytes)

    def drop(self, chosen: Callable[[StoredBlock], bool]) -> Iterator[ListStep]:
        """Remove chosen blocks, yielding these. A namespace without any left loses its manifest, and keeps its marker:
        an epoch never decreases."""
        dropped: set[bytes] = set()
        kept: set[bytes] = set()
        for values, blocks in self._pages():
            pairs = [(one, block) for one, block in zip(values, blocks, strict=True) if block is not None]
            going = [(one, block) for one, block in pairs if chosen(block)]
            if going:
                self._listing.remove([one for one, _ in going])
            dropped.update(block.namespace for _, block in going)
            kept.update(block.namespace for _, block in pairs if not chosen(block))
            kept.update(one.name.namespace for one in values if one.name is not None and _is_other_version(one))
            yield ListStep(len(values), [block for _, block in going])
        for namespace in dropped - kept:
            self._listing.forget(namespace)

    def _pages(self) -> Iterator[tuple[Sequence[Listed], list[StoredBlock | None]]]:
        numbers = count()
        for page in self._listing.pages():
            yield (
                page,
                [
                    None if one.name is None or _is_other_version(one) else self._block(one, one.name, next(numbers))
                    for one in page
                ],
            )

    def _block(self, one: Listed, name: BlockName, number: int) -> StoredBlock:
        return StoredBlock(
            state=self._state(name) if one.whole else BlockState.ORPHANED,
            namespace=name.namespace,
            group=None,
            key=name.key,
            region=0,
            slot=number,
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

    def _namespaces(self) -> tuple[StoredNamespace, ...]:
        manifests = self._listing.manifests(self._markers)
        return tuple(
            StoredNamespace(digest, marker.epoch, None, None, *read_manifest(manifests.get(digest, "")))
            for digest, marker in sorted(self._markers.items())
        )


def _is_other_version(one: Listed) -> bool:
    return one.name is not None and one.name.is_other_version


def _leftover(one: Listed, block: StoredBlock | None) -> Finding:
    if block is None:
        return Finding(FindingKind.UNKNOWN_FILE, "name", one.shown)
    return leftover(block.state, one.shown)


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

"""Learning again what a root holds: from the snapshot of a clean close, else from the headers on its disk alone."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple, TypeVar

from kvtier.keys import OffloadKey, key_group
from kvtier_fs.buffers import HeaderPages
from kvtier_fs.io.contract import IOKind, IORequest
from kvtier_fs.regions import RegionHeader, decode_region_header
from kvtier_fs.root import Root
from kvtier_fs.slot import SlotHeader, decode_slot_header
from kvtier_fs.snapshot import RegionCutAs, Snapshot

T = TypeVar("T")

_PAGES_PER_BATCH = 256
_BATCHES_AT_ONCE = 2


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which entries count: ours, of this epoch, of the sizes this layout stores (both by group)."""

    namespace: bytes
    epoch: int
    slot_bytes: tuple[int, ...]
    payload_bytes: tuple[int, ...]

    def counts(self, header: SlotHeader) -> bool:
        """True if a header speaks of a block that this tier could be asked for."""
        group = header.group
        return (
            header.namespace == self.namespace
            and header.epoch == self.epoch
            and group < len(self.slot_bytes)
            and header.slot_bytes == self.slot_bytes[group]
            and header.payload_bytes == self.payload_bytes[group]
            and len(header.key) > 4
            and key_group(OffloadKey(header.key)) == group
        )


class SlotAt(NamedTuple):
    """A slot of a root: its region (within the root) and its number in the region."""

    region: int
    number: int


async def recover_root(root: Root, wanted: Wanted) -> bool:
    """Find out how the regions are cut and what their slots hold: from the snapshot, else by scanning the headers.

    Returns True if the snapshot served. Raises OSError.
    """
    for number in await root.call(root.folder.existing_slabs):
        await root.open_slab(number)
    pages = HeaderPages(_PAGES_PER_BATCH * _BATCHES_AT_ONCE, root.plan.header_bytes)
    await _read_regions(root, pages)
    if root.snapshot is not None and await root.call(_apply_snapshot, root, root.snapshot):
        return True
    for region, state in enumerate(root.regions):
        if state.ready:
            root.ledger.cut(region, state.generation, root.plan.slots(state.slot_bytes))
    await _scan_slots(root, wanted, pages)
    return False


async def _read_regions(root: Root, pages: HeaderPages) -> None:
    """Read every region header. What cannot be read, or is not where it says it is, does not count."""
    plan = root.plan
    present = [region for region in range(plan.regions) if plan.file_of(region) in root.fds]
    heads = ((root.fds[plan.file_of(region)], plan.region_offset(region), region) for region in present)
    for chunk in _chunks(heads):
        whole = await _read_pages(root, pages.pages[: len(chunk)], [(fd, offset) for fd, offset, _ in chunk])
        for page, good, (_, _, region) in zip(pages.pages, whole, chunk, strict=False):
            header = decode_region_header(page) if good else None
            if header is not None and _is_at(root, header, region):
                state = root.regions[region]
                state.slot_bytes, state.generation = header.slot_bytes, header.generation
                state.ready = state.allocated = True


def _apply_snapshot(root: Root, snapshot: Snapshot) -> bool:
    """Take a snapshot's word for what the slots hold. False if the regions on the disk are not those it speaks of."""
    cuts = snapshot.cuts[: root.plan.regions]
    cuts += (RegionCutAs(0, 0),) * (root.plan.regions - len(cuts))
    for state, cut in zip(root.regions, cuts, strict=True):
        if cut.slot_bytes != state.slot_bytes or (cut.slot_bytes and cut.generation != state.generation):
            return False
    for region, (state, cut) in enumerate(zip(root.regions, cuts, strict=True)):
        state.generation = cut.generation
        if cut.slot_bytes and not snapshot.fill(root.ledger, region, root.plan.slots(cut.slot_bytes)):
            return False
    return True


def _is_at(root: Root, header: RegionHeader, region: int) -> bool:
    return (
        header.root_uuid == root.superblock.root_uuid
        and header.region == region
        and header.generation > 0
        and root.plan.can_be_cut(header.slot_bytes)
    )


async def _scan_slots(root: Root, wanted: Wanted, pages: HeaderPages) -> None:
    slots = (
        SlotAt(region, index)
        for region, state in enumerate(root.regions)
        if state.ready
        for index in range(root.plan.slots(state.slot_bytes))
    )
    chunks = _chunks(slots)

    async def work(own: list[memoryview]) -> None:
        for chunk in chunks:
            places = [(_fd(root, at), _offset(root, at)) for at in chunk]
            whole = await _read_pages(root, own[: len(chunk)], places)
            await root.call(_record, root, wanted, list(zip(chunk, own, whole, strict=False)))

    halves = [pages.pages[start::_BATCHES_AT_ONCE] for start in range(_BATCHES_AT_ONCE)]
    await asyncio.gather(*(work(half) for half in halves))


def _record(root: Root, wanted: Wanted, read: list[tuple[SlotAt, memoryview, bool]]) -> None:
    uuid, ledger = root.superblock.root_uuid, root.ledger
    for at, page, good in read:
        header = decode_slot_header(page) if good else None
        if header is None or header.root_uuid != uuid or (header.region, header.slot_index) != at:
            continue
        ours = header.namespace == wanted.namespace
        if header.slot_bytes == root.regions[at.region].slot_bytes and (not ours or wanted.counts(header)):
            ledger.record(header)


def _fd(root: Root, at: SlotAt) -> int:
    return root.fds[root.plan.file_of(at.region)]


def _offset(root: Root, at: SlotAt) -> int:
    return root.plan.slot_offset(at.region, at.number, root.regions[at.region].slot_bytes)


def _chunks(items: Iterable[T]) -> Iterator[list[T]]:
    iterator = iter(items)
    while chunk := list(islice(iterator, _PAGES_PER_BATCH)):
        yield chunk


async def _read_pages(root: Root, pages: Sequence[memoryview], places: Sequence[tuple[int, int]]) -> list[bool]:
    """Read a header page from each place. Returns which of them came whole."""
    whole = [False] * len(places)
    left = len(places)
    ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def done(request: IORequest, result: int) -> None:
        nonlocal left
        left -= 1
        whole[numbers[request]] = result == request.length
        if not left and not ended.done():
            ended.set_result(None)

    requests = [
        IORequest(IOKind.READ, fd, offset, [page], done) for page, (fd, offset) in zip(pages, places, strict=True)
    ]
    numbers = {request: number for number, request in enumerate(requests)}
    root.engine.submit(requests)
    await ended
    return whole

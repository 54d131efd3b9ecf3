"""Rebuilding the directory: which blocks of our namespace a root holds, told by the headers on its disk alone."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple, TypeVar

from kvtier.jobs import RegionCut, int_array
from kvtier.keys import OffloadKey, key_group
from kvtier.loadstore import Recovered, SlotSpace
from kvtier_fs.buffers import HeaderPages
from kvtier_fs.io.contract import IOKind, IORequest
from kvtier_fs.regions import RegionHeader, decode_region_header
from kvtier_fs.root import Root
from kvtier_fs.slot import SlotHeader, decode_slot_header

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


class Entry(NamedTuple):
    """A block found on disk."""

    key: bytes
    at: SlotAt
    generation: int


async def scan_root(root: Root, wanted: Wanted) -> list[Entry]:
    """Read every region header and then every slot header of the regions cut to our sizes.

    Fills the root's table of regions. What cannot be read, or is not where it says it is, does not count.
    """
    for number in await root.call(root.folder.existing_slabs):
        await root.open_slab(number)
    plan = root.plan
    present = [region for region in range(plan.regions) if plan.file_of(region) in root.fds]
    pages = HeaderPages(_PAGES_PER_BATCH * _BATCHES_AT_ONCE, plan.header_bytes)
    heads = ((root.fds[plan.file_of(region)], plan.region_offset(region), region) for region in present)
    for chunk in _chunks(heads):
        whole = await _read_pages(root, pages.pages[: len(chunk)], [(fd, offset) for fd, offset, _ in chunk])
        for page, good, (_, _, region) in zip(pages.pages, whole, chunk, strict=False):
            header = decode_region_header(page) if good else None
            if header is not None and _is_at(root, header, region):
                state = root.regions[region]
                state.slot_bytes, state.generation = header.slot_bytes, header.generation
                state.ready = state.allocated = True
    return await _scan_slots(root, wanted, pages)


def _is_at(root: Root, header: RegionHeader, region: int) -> bool:
    plan = root.plan
    return (
        header.root_uuid == root.superblock.root_uuid
        and header.region == region
        and header.generation > 0
        and plan.header_bytes < header.slot_bytes <= plan.region_bytes
        and header.slot_bytes % plan.header_bytes == 0
    )


async def _scan_slots(root: Root, wanted: Wanted, pages: HeaderPages) -> list[Entry]:
    sizes = set(wanted.slot_bytes)
    slots = (
        SlotAt(region, index)
        for region, state in enumerate(root.regions)
        if state.ready and state.slot_bytes in sizes
        for index in range(root.plan.slots(state.slot_bytes))
    )
    chunks = _chunks(slots)
    entries: list[Entry] = []

    async def work(own: list[memoryview]) -> None:
        for chunk in chunks:
            places = [(_fd(root, at), _offset(root, at)) for at in chunk]
            whole = await _read_pages(root, own[: len(chunk)], places)
            entries.extend(await root.call(_decode, root, wanted, list(zip(chunk, own, whole, strict=False))))

    halves = [pages.pages[start::_BATCHES_AT_ONCE] for start in range(_BATCHES_AT_ONCE)]
    await asyncio.gather(*(work(half) for half in halves))
    return entries


def _decode(root: Root, wanted: Wanted, read: list[tuple[SlotAt, memoryview, bool]]) -> list[Entry]:
    entries = []
    uuid = root.superblock.root_uuid
    for at, page, good in read:
        header = decode_slot_header(page) if good else None
        if header is None or header.root_uuid != uuid or (header.region, header.slot_index) != at:
            continue
        state = root.regions[at.region]
        if (header.region_generation, header.slot_bytes) == (state.generation, state.slot_bytes) and wanted.counts(
            header
        ):
            entries.append(Entry(header.key, at, header.generation))
    return entries


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


def recovered(roots: Sequence[Root], space: SlotSpace, found: Sequence[list[Entry]]) -> Recovered:
    """What all roots hold together: each key once, its newest copy, from the oldest generation to the newest."""
    newest: dict[bytes, tuple[int, int]] = {}
    for root, entries in zip(roots, found, strict=True):
        for key, at, generation in entries:
            slot = (root.first_region + at.region) * space.slots_per_region + at.number
            if key not in newest or newest[key] < (generation, slot):
                newest[key] = (generation, slot)
    ordered = sorted(newest.items(), key=lambda item: item[1])
    return Recovered(
        keys=[OffloadKey(key) for key, _ in ordered],
        slots=int_array([slot for _, (_, slot) in ordered]),
        generations=int_array([generation for _, (generation, _) in ordered]),
        cuts=tuple(
            RegionCut(root.first_region + region, state.slot_bytes, state.generation)
            for root in roots
            for region, state in enumerate(root.regions)
            if state.ready
        ),
    )

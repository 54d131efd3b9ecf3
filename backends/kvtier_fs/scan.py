"""Learning again what a root holds: from the snapshot of a clean close, else from the headers on its disk alone."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from typing import NamedTuple, TypeVar

from kvtier.keys import OffloadKey, key_group
from kvtier_fs.buffers import HeaderPages
from kvtier_fs.io.contract import IOKind
from kvtier_fs.regions import RegionHeader, decode_region_header
from kvtier_fs.root import Root
from kvtier_fs.slot import SlotHeader, decode_slot_header
from kvtier_fs.snapshot import RegionCutAs, Snapshot

T = TypeVar("T")

_PAGES_PER_BATCH = 256
_SPAN_BYTES = 256 << 10
_SPANS_PER_BATCH = 32
_SLOTS_WORTH_A_SPAN = 8
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


class Span(NamedTuple):
    """Neighbouring slots of a region (numbered within the root) whose headers are read in one request."""

    region: int
    first: int
    slots: int


async def recover_root(root: Root, wanted: Wanted) -> bool:
    """Find out how the regions are cut and what their slots hold: from the snapshot, else by scanning the headers.

    Returns True if the snapshot served. Raises OSError.
    """
    for number in await root.call(root.folder.existing_slabs):
        await root.open_slab(number)
    await _read_regions(root)
    if root.snapshot is not None and await root.call(_apply_snapshot, root, root.snapshot):
        return True
    for region, state in enumerate(root.regions):
        if state.ready:
            root.ledger.cut(region, state.generation, root.plan.slots(state.slot_bytes))
    await _scan_slots(root, wanted)
    return False


async def _read_regions(root: Root) -> None:
    """Read every region header. What cannot be read, or is not where it says it is, does not count."""
    plan = root.plan
    pages = HeaderPages(_PAGES_PER_BATCH, plan.header_bytes).pages
    present = [region for region in range(plan.regions) if plan.file_of(region) in root.fds]
    heads = ((root.fds[plan.file_of(region)], plan.region_offset(region), region) for region in present)
    for chunk in _chunks(heads, _PAGES_PER_BATCH):
        errors = await root.io.move(IOKind.READ, pages[: len(chunk)], [(fd, offset) for fd, offset, _ in chunk])
        for page, error, (_, _, region) in zip(pages, errors, chunk, strict=False):
            header = None if error else decode_region_header(page)
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


async def _scan_slots(root: Root, wanted: Wanted) -> None:
    """Read every slot header. Small slots are read through, payloads and all: that is fewer requests to the disk."""
    narrow: list[int] = []
    wide: list[Span] = []
    for region, state in enumerate(root.regions):
        if state.ready and state.slot_bytes > _SPAN_BYTES // _SLOTS_WORTH_A_SPAN:
            narrow.append(region)
        elif state.ready:
            slots, each = root.plan.slots(state.slot_bytes), _SPAN_BYTES // state.slot_bytes
            wide += (Span(region, first, min(each, slots - first)) for first in range(0, slots, each))
    spoiled = await _scan_spans(root, wanted, iter(wide), (_SPANS_PER_BATCH, _SPAN_BYTES))
    single = chain(
        (Span(region, i, 1) for region in narrow for i in range(root.plan.slots(root.regions[region].slot_bytes))),
        (Span(span.region, span.first + i, 1) for span in spoiled for i in range(span.slots)),
    )
    await _scan_spans(root, wanted, single, (_PAGES_PER_BATCH, root.plan.header_bytes))


async def _scan_spans(root: Root, wanted: Wanted, spans: Iterator[Span], buffers: tuple[int, int]) -> list[Span]:
    """Read spans, some batches at once, each with so many `buffers` of so many bytes; record the headers found.

    Returns the spans that did not come whole.
    """
    per_batch, span_bytes = buffers
    chunks = _chunks(spans, per_batch)
    spoiled: list[Span] = []

    async def work() -> None:
        own: list[memoryview] = []
        for chunk in chunks:
            own = own or HeaderPages(per_batch, span_bytes).pages
            views = [view[: _length(root, span)] for view, span in zip(own, chunk, strict=False)]
            places = [(_fd(root, span), _offset(root, span)) for span in chunk]
            errors = await root.io.move(IOKind.READ, views, places)
            whole = [(span, view) for span, view, error in zip(chunk, views, errors, strict=True) if not error]
            spoiled.extend(span for span, error in zip(chunk, errors, strict=True) if error)
            await root.call(_record, root, wanted, whole)

    await asyncio.gather(*(work() for _ in range(_BATCHES_AT_ONCE)))
    return spoiled


def _record(root: Root, wanted: Wanted, read: list[tuple[Span, memoryview]]) -> None:
    """Enter the slots whose headers are whole and in their place."""
    uuid, ledger, header_bytes = root.superblock.root_uuid, root.ledger, root.plan.header_bytes
    for span, view in read:
        slot_bytes = root.regions[span.region].slot_bytes
        for number in range(span.slots):
            header = decode_slot_header(view[number * slot_bytes : number * slot_bytes + header_bytes])
            if header is None or header.root_uuid != uuid or header.slot_bytes != slot_bytes:
                continue
            if (header.region, header.slot_index) != (span.region, span.first + number):
                continue
            if header.namespace != wanted.namespace or wanted.counts(header):
                ledger.record(header)


def _fd(root: Root, span: Span) -> int:
    return root.fds[root.plan.file_of(span.region)]


def _offset(root: Root, span: Span) -> int:
    return root.plan.slot_offset(span.region, span.first, root.regions[span.region].slot_bytes)


def _length(root: Root, span: Span) -> int:
    """From the first header of a span to the end of its last."""
    return (span.slots - 1) * root.regions[span.region].slot_bytes + root.plan.header_bytes


def _chunks(items: Iterable[T], size: int) -> Iterator[list[T]]:
    iterator = iter(items)
    while chunk := list(islice(iterator, size)):
        yield chunk

"""Learning again what a root holds: from the snapshot of a clean close, else from the headers on its disk alone."""

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from kvtier.tier.block_age import NO_AGE_LIMIT, AgeLimit
from kvtier.tier.block_envelope import decode_slot_header
from kvtier.tier.contract import ForeignBlocks, Recovered, SlotSpace
from kvtier.types.arrays import IntArray, int_array
from kvtier.types.jobs import RegionFormat
from kvtier.types.keys import GROUP_BYTES, OffloadKey
from kvtier_fs.format.region_header import RegionHeader, decode_region_header
from kvtier_fs.format.slot_map import NO_OWNER, RegionSlots
from kvtier_fs.format.snapshot import Snapshot, StoredFormat
from kvtier_fs.io.contract import HeaderPages, IOKind
from kvtier_fs.local.layout import RootSession
from kvtier_fs.local.root import Root

T = TypeVar("T")

_PAGES_PER_BATCH = 256
_SPAN_BYTES = 256 << 10
_SPANS_PER_BATCH = 32
_SLOTS_WORTH_A_SPAN = 8
_BATCHES_AT_ONCE = 2


class HeaderSpan(NamedTuple):
    """Neighbouring slots of a region (numbered within the root) whose headers are read in one request."""

    region: int
    first: int
    slots: int


async def recover_root(root: Root, session: RootSession) -> bool:
    """Find out the formats of the regions and what their slots hold: from the snapshot, else by scanning the headers.

    Returns True if the snapshot served. Raises OSError.
    """
    for number in await root.call(root.folder.existing_slabs):
        await root.open_slab(number)
    await _read_regions(root)
    if root.snapshot is not None and await root.call(_apply_snapshot, root, root.snapshot):
        return True
    for region, state in enumerate(root.regions):
        if state.ready:
            root.slot_map.format(region, state.generation, root.plan.slots(state.slot_bytes))
    await _scan_slots(root, session)
    return False


async def _read_regions(root: Root) -> None:
    """Read every region header. What cannot be read, or is not where it says it is, does not count."""
    plan = root.plan
    pages = HeaderPages(_PAGES_PER_BATCH, plan.header_bytes).pages
    present = [region for number in root.fds for region in plan.regions_of(number)]
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
    formats = snapshot.formats[: root.plan.regions]
    formats += (StoredFormat(0, 0),) * (root.plan.regions - len(formats))
    for state, form in zip(root.regions, formats, strict=True):
        if form.slot_bytes != state.slot_bytes or (form.slot_bytes and form.generation != state.generation):
            return False
    for region, (state, form) in enumerate(zip(root.regions, formats, strict=True)):
        state.generation = form.generation
        if form.slot_bytes and not snapshot.fill(root.slot_map, region, root.plan.slots(form.slot_bytes)):
            return False
    return True


def _is_at(root: Root, header: RegionHeader, region: int) -> bool:
    return (
        header.root_uuid == root.superblock.root_uuid
        and header.region == region
        and header.generation > 0
        and root.plan.can_be_formatted(header.slot_bytes)
    )


async def _scan_slots(root: Root, session: RootSession) -> None:
    """Read every slot header. Small slots are read through, payloads and all: that is fewer requests to the disk."""
    narrow: list[int] = []
    wide: list[HeaderSpan] = []
    for region, state in enumerate(root.regions):
        if state.ready and state.slot_bytes > _SPAN_BYTES // _SLOTS_WORTH_A_SPAN:
            narrow.append(region)
        elif state.ready:
            slots, each = root.plan.slots(state.slot_bytes), _SPAN_BYTES // state.slot_bytes
            wide += (HeaderSpan(region, first, min(each, slots - first)) for first in range(0, slots, each))
    spoiled = await _scan_spans(root, session, iter(wide), (_SPANS_PER_BATCH, _SPAN_BYTES))
    single = chain(
        (
            HeaderSpan(region, i, 1)
            for region in narrow
            for i in range(root.plan.slots(root.regions[region].slot_bytes))
        ),
        (HeaderSpan(span.region, span.first + i, 1) for span in spoiled for i in range(span.slots)),
    )
    await _scan_spans(root, session, single, (_PAGES_PER_BATCH, root.plan.header_bytes))


async def _scan_spans(
    root: Root, session: RootSession, spans: Iterator[HeaderSpan], buffers: tuple[int, int]
) -> list[HeaderSpan]:
    """Read spans, some batches at once, each with so many `buffers` of so many bytes; record the headers found.

    Returns the spans that did not come whole.
    """
    per_batch, span_bytes = buffers
    chunks = _chunks(spans, per_batch)
    spoiled: list[HeaderSpan] = []

    async def work() -> None:
        own: list[memoryview] = []
        for chunk in chunks:
            own = own or HeaderPages(per_batch, span_bytes).pages
            views = [view[: _length(root, span)] for view, span in zip(own, chunk, strict=False)]
            places = [(_fd(root, span), _offset(root, span)) for span in chunk]
            errors = await root.io.move(IOKind.READ, views, places)
            whole = [(span, view) for span, view, error in zip(chunk, views, errors, strict=True) if not error]
            spoiled.extend(span for span, error in zip(chunk, errors, strict=True) if error)
            await root.call(_record, root, session, whole)

    await asyncio.gather(*(work() for _ in range(_BATCHES_AT_ONCE)))
    return spoiled


def _record(root: Root, session: RootSession, read: list[tuple[HeaderSpan, memoryview]]) -> None:
    """Enter the slots whose headers are whole and in their place."""
    uuid, slot_map, header_bytes = root.superblock.root_uuid, root.slot_map, root.plan.header_bytes
    for span, view in read:
        slot_bytes = root.regions[span.region].slot_bytes
        for number in range(span.slots):
            header = decode_slot_header(view[number * slot_bytes : number * slot_bytes + header_bytes])
            if header is None or header.root_uuid != uuid or header.slot_bytes != slot_bytes:
                continue
            if (header.region, header.slot_index) != (span.region, span.first + number):
                continue
            if header.namespace != session.namespace or session.counts(header):
                slot_map.record(header)


def _fd(root: Root, span: HeaderSpan) -> int:
    return root.fds[root.plan.file_of(span.region)]


def _offset(root: Root, span: HeaderSpan) -> int:
    return root.plan.slot_offset(span.region, span.first, root.regions[span.region].slot_bytes)


def _length(root: Root, span: HeaderSpan) -> int:
    """From the first header of a span to the end of its last."""
    return (span.slots - 1) * root.regions[span.region].slot_bytes + root.plan.header_bytes


def _chunks(items: Iterable[T], size: int) -> Iterator[list[T]]:
    iterator = iter(items)
    while chunk := list(islice(iterator, size)):
        yield chunk


def recovered(roots: Sequence[Root], space: SlotSpace, limit: AgeLimit = NO_AGE_LIMIT) -> Recovered:
    """The content of all roots, as far as the limit of ages allows it: each key once, its newest copy, from the
    oldest generation to the newest."""
    groups: dict[int, set[bytes]] = {}
    for group, size in enumerate(space.slot_bytes):
        groups.setdefault(size, set()).add(group.to_bytes(GROUP_BYTES, "big"))
    ours = _Blocks()
    for root in roots:
        for region, slots in root.slot_map.regions():
            if (size := root.regions[region].slot_bytes) in groups:
                numbers = slots.numbers_within(root.slot_map.own, limit)
                keys = [key for number in numbers.tolist() if (key := slots.keys[number]) is not None]
                fitting = [at for at, key in enumerate(keys) if key[-GROUP_BYTES:] in groups[size]]
                if len(fitting) < len(keys):
                    numbers, keys = numbers[fitting], [keys[at] for at in fitting]
                ours.add(slots, numbers, (root.first_region + region) * space.slots_per_region)
                ours.keys += keys
    order = ours.by_age()
    keys = [ours.keys[at] for at in order.tolist()]
    newest = dict(zip(keys, range(len(keys)), strict=True))
    if len(newest) < len(keys):
        kept = np.sort(int_array(list(newest.values())))
        order, keys = order[kept], [keys[at] for at in kept.tolist()]
    return Recovered(
        keys=[OffloadKey(key) for key in keys],
        slots=ours.slots[order],
        generations=ours.generations[order].astype(np.int64),
        formats=tuple(
            RegionFormat(root.first_region + region, state.slot_bytes if state.ready else 0, state.generation)
            for root in roots
            for region, state in enumerate(root.regions)
            if state.generation
        ),
        foreign=foreign(roots, space),
    )


@dataclass(slots=True)
class _Blocks:
    """Slots with their generations, collected region by region."""

    keys: list[bytes] = field(default_factory=list)
    regions: list[int] = field(default_factory=list)
    _slots: list[IntArray] = field(default_factory=list)
    _generations: list[npt.NDArray[np.uint64]] = field(default_factory=list)

    def add(self, slots: RegionSlots, numbers: IntArray, first: int) -> None:
        self._slots.append(numbers + first)
        self._generations.append(np.frombuffer(slots.generations, dtype=np.uint64)[numbers])

    @property
    def slots(self) -> IntArray:
        return int_array(np.concatenate([int_array(()), *self._slots]))

    @property
    def generations(self) -> npt.NDArray[np.uint64]:
        return np.concatenate([np.zeros(0, dtype=np.uint64), *self._generations])

    def by_age(self) -> IntArray:
        """Positions from the oldest generation to the newest."""
        return np.lexsort((self.slots, self.generations))


def foreign(roots: Sequence[Root], space: SlotSpace) -> tuple[ForeignBlocks, ...]:
    """The blocks of other namespaces, the one unused for longest first.

    A region of a size that is none of ours counts as the youngest namespace's that has a block in it.
    """
    unused = _sessions_unused(roots)
    found: dict[bytes, _Blocks] = {}
    for root in roots:
        names = [owner.namespace for owner in root.slot_map.owners]
        for region, slots in root.slot_map.regions():
            numbered = root.first_region + region
            others = [at for at in sorted(set(slots.owners)) if at not in (NO_OWNER, root.slot_map.own)]
            if others and root.regions[region].slot_bytes not in space.slot_bytes:
                youngest = min((names[at] for at in others), key=lambda name: (unused[name], name))
                found.setdefault(youngest, _Blocks()).regions.append(numbered)
                continue
            for at in others:
                first = numbered * space.slots_per_region
                found.setdefault(names[at], _Blocks()).add(slots, slots.numbers_of(at), first)
    oldest_first = sorted(found, key=lambda name: (unused[name], name), reverse=True)
    blocks = (found[name] for name in oldest_first)
    return tuple(ForeignBlocks(each.slots[each.by_age()], tuple(each.regions)) for each in blocks)


def _sessions_unused(roots: Sequence[Root]) -> dict[bytes, int]:
    """For each namespace, the sessions since it was last opened, in the root that remembers it best."""
    unused: dict[bytes, int] = {}
    for root in roots:
        for namespace, entry in root.superblock.namespaces:
            sessions = root.superblock.session - entry.session
            unused[namespace] = min(sessions, unused.get(namespace, sessions))
    return unused

"""A root whose capacity was lowered: its newest blocks are moved into the regions that stay, the oldest are dropped.

Until the end the superblock states the larger root, and a block that is moved is in two places. A crash loses nothing
but the old blocks that were written over.
"""

import asyncio
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from typing import NamedTuple

from kvtier.tier.block_envelope import SlotHeader, decode_slot_header, encode_slot_header
from kvtier_fs.format.region_header import REGIONS_PER_FILE, RegionPlan
from kvtier_fs.format.slot_map import NO_OWNER, SlotMap
from kvtier_fs.io.contract import HeaderPages, IOKind
from kvtier_fs.local.root import Root

_BATCH_BYTES = 16 << 20
_BATCH_MAX = 64
MOVE_SECONDS = 10.0
"""So long an opening moves blocks; what is left then, the oldest, is dropped."""


class _Place(NamedTuple):
    """A slot of a root."""

    region: int
    number: int


_Choice = tuple[int, list[tuple[_Place, _Place]]]
"""The blocks of one slot size: which go where, the newest first."""


async def plan_to_read(root: Root, plan: RegionPlan, slot_sizes: Collection[int]) -> RegionPlan:
    """The regions that a root may hold blocks in: those of `plan`, or more or larger ones from before it was shrunk.

    Raises OSError. A superblock that states more regions than the disk holds bytes for is not followed.
    """
    stored = root.stored
    if stored is None or stored.regions * stored.stride <= plan.regions * plan.stride:
        return plan
    if stored.stride != plan.stride:
        first = await root.call(root.folder.first_slot_bytes, plan.header_bytes)
        if stored.stride < plan.stride or plan.files > 1 or set(slot_sizes) != {first}:
            return plan
    held = await root.call(root.folder.slab_bytes)
    regions = min(stored.regions, held // stored.stride + REGIONS_PER_FILE)
    if stored.stride == plan.stride:
        regions = max(plan.regions, regions)
    return RegionPlan(stored.stride, plan.header_bytes, max(1, regions))


async def shrink(root: Root, plan: RegionPlan, slot_sizes: Sequence[int]) -> str:
    """Bring a root that was read within `plan`. Returns a note; empty if it was read by that plan.

    Raises RootError or OSError.
    """
    if root.plan == plan:
        return ""
    before = _blocks(root)
    if root.plan.stride == plan.stride:
        await _move_all(root, _choices(root, _places(root, plan.regions)))
        root.forget_from(plan)
    else:
        await _move_all(root, _choices(root, _front(root, plan, slot_sizes[0])))
        await _divide(root, plan, slot_sizes[0])
    await root.write_superblock(replace(root.superblock, stride=plan.stride, regions=plan.regions))
    await root.call(root.folder.trim, plan)
    dropped = before - _blocks(root)
    return f"{root.path}: {dropped} blocks were evicted to keep the capacity, the oldest first"


def _blocks(root: Root) -> int:
    """The number of blocks of a root, several copies of one counted once."""
    held = ((slots.owners[at], slots.keys[at]) for _, slots in root.slot_map.regions() for at in slots.numbers_held())
    return len(set(held))


def _places(root: Root, regions: int) -> dict[int, list[_Place]]:
    """The slots of the first regions, by their size."""
    room: dict[int, list[_Place]] = {}
    for region, slots in root.slot_map.regions():
        if region < regions:
            places = room.setdefault(root.regions[region].slot_bytes, [])
            places += (_Place(region, index) for index in range(len(slots.keys)))
    return room


def _front(root: Root, plan: RegionPlan, slot_bytes: int) -> dict[int, list[_Place]]:
    """The first slots of the first region, as many as a plan of smaller regions has; none if they have another size."""
    places = _places(root, 1).get(slot_bytes, [])
    return {slot_bytes: places[: plan.regions * plan.slots(slot_bytes)]}


async def _move_all(root: Root, choices: Iterator[_Choice]) -> None:
    """Move blocks until the time is up."""
    deadline = asyncio.get_running_loop().time() + MOVE_SECONDS
    for slot_bytes, moves in choices:
        count = max(1, min(_BATCH_MAX, _BATCH_BYTES // slot_bytes))
        buffers = HeaderPages(min(count, len(moves)), slot_bytes).pages
        for at in range(0, len(moves), count):
            if asyncio.get_running_loop().time() >= deadline:
                return
            await _move(root, slot_bytes, moves[at : at + count], buffers)


async def _divide(root: Root, plan: RegionPlan, slot_bytes: int) -> None:
    """Lay the front of the first region out anew, as the smaller regions of a plan, and forget everything else.

    The last block goes first: each goes to where it was, or behind that.
    """
    per_region, old = plan.slots(slot_bytes), root.slot_map
    first, generation = dict(old.regions()).get(0), 1 + max(state.generation for state in root.regions)
    state = root.regions[0]
    held = [] if first is None or state.slot_bytes != slot_bytes else first.numbers_held()
    held = [at for at in held if at < plan.regions * per_region]
    shifted = [await _shift(root, plan, at, generation) for at in reversed(held) if at >= per_region]
    root.take_plan(plan, SlotMap(old.owners, old.owners[old.own].namespace))
    if first is None or not held:
        return
    root.regions[0] = state
    root.slot_map.format(0, state.generation, per_region)
    for at in held:
        if at < per_region:
            key = [first.keys[at] or b""]
            root.slot_map.hold_all(first.owners[at], (0, state.generation), [at], key, [first.generations[at]])
    for region in range(1, plan.regions):
        root.regions[region].allocated = True
        root.format_region(region, slot_bytes, generation)
    await root.wait_formats()
    for header in shifted:
        if header is not None and root.regions[header.region].ready:
            root.slot_map.record(header)


async def _shift(root: Root, plan: RegionPlan, at: int, generation: int) -> SlotHeader | None:
    """Move a block of the first region to its place among the smaller regions. None if the disk failed."""
    slot_bytes = root.regions[0].slot_bytes
    region, index = divmod(at, plan.slots(slot_bytes))
    (page,) = HeaderPages(1, slot_bytes).pages
    fd = root.fds[0]
    read = await root.io.move(IOKind.READ, [page], [(fd, root.plan.slot_offset(0, at, slot_bytes))])
    header = None if any(read) else decode_slot_header(page[: plan.header_bytes])
    if header is None or (header.region, header.slot_index) != (0, at):
        return None
    header = header._replace(region=region, slot_index=index, region_generation=generation)
    encode_slot_header(header, page[: plan.header_bytes])
    written = await root.io.move(IOKind.WRITE, [page], [(fd, plan.slot_offset(region, index, slot_bytes))])
    return None if any(written) else header


def _choices(root: Root, room: Mapping[int, Sequence[_Place]]) -> Iterator[_Choice]:
    """Our newest blocks stay, then the newest of other namespaces, as many as there is room for their size."""
    stays = {place for places in room.values() for place in places}
    for size, aged in _by_age(root, stays).items():
        places = room.get(size, ())
        kept = aged[: len(places)]
        taken = set(kept)
        free = (place for place in places if place not in taken)
        moves = list(zip((place for place in kept if place not in stays), free, strict=False))
        if moves:
            yield size, moves


def _by_age(root: Root, stays: Set[_Place]) -> dict[int, list[_Place]]:
    """The places of the blocks of each slot size, ours before others', the newest first. Each key of a namespace once:
    its newest copy, of equal ones the one in a place that stays."""
    newest: dict[tuple[int, bytes | None], tuple[bool, int, bool, _Place]] = {}
    for region, slots in root.slot_map.regions():
        for index, (owner, key) in enumerate(zip(slots.owners, slots.keys, strict=True)):
            if owner != NO_OWNER:
                place = _Place(region, index)
                age = owner == root.slot_map.own, slots.generations[index], place in stays, place
                newest[owner, key] = max(age, newest.get((owner, key), age))
    sizes: dict[int, list[_Place]] = {}
    for *_, place in sorted(newest.values(), reverse=True):
        sizes.setdefault(root.regions[place.region].slot_bytes, []).append(place)
    return sizes


async def _move(
    root: Root, slot_bytes: int, moves: Sequence[tuple[_Place, _Place]], buffers: Sequence[memoryview]
) -> None:
    """Move blocks, headers and payloads. One is lost where the disk fails."""
    views = list(buffers[: len(moves)])
    read = await root.io.move(IOKind.READ, views, [_at(root, source, slot_bytes) for source, _ in moves])
    writing = []
    for view, error, (source, target) in zip(views, read, moves, strict=True):
        page = view[: root.plan.header_bytes]
        header = None if error else decode_slot_header(page)
        if header is None or (header.region, header.slot_index) != source:
            continue
        generation = root.regions[target.region].generation
        header = header._replace(region=target.region, slot_index=target.number, region_generation=generation)
        encode_slot_header(header, page)
        root.slot_map.begin_all(target.region, (target.number,))
        writing.append((view, header, _at(root, target, slot_bytes)))
    written = await root.io.move(IOKind.WRITE, [view for view, *_ in writing], [place for *_, place in writing])
    for (_, header, _), error in zip(writing, written, strict=True):
        if not error:
            root.slot_map.record(header)
    for source, _ in moves:
        root.slot_map.begin_all(source.region, (source.number,))


def _at(root: Root, place: _Place, slot_bytes: int) -> tuple[int, int]:
    fd = root.fds[root.plan.file_of(place.region)]
    return fd, root.plan.slot_offset(place.region, place.number, slot_bytes)

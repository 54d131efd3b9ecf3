"""A root whose capacity was lowered: its newest blocks are moved into the regions that stay, the oldest are dropped.

Until the end the superblock states the larger root, and a block that is moved is in two places. A crash loses nothing
but the old blocks that were written over.
"""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from kvtier.tier_api.block_envelope import decode_slot_header, encode_slot_header
from kvtier_fs.format.region_header import REGIONS_PER_FILE, RegionPlan
from kvtier_fs.format.slot_map import NO_OWNER
from kvtier_fs.io.contract import IOKind
from kvtier_fs.io.header_pages import HeaderPages
from kvtier_fs.slab.root import Root

_BATCH_BYTES = 16 << 20
_BATCH_MAX = 64
MOVE_SECONDS = 10.0
"""So long an opening moves blocks; what is left then, the oldest, is dropped."""


class _Place(NamedTuple):
    """A slot of a root."""

    region: int
    index: int


@dataclass(frozen=True, slots=True)
class _Choice:
    """The blocks of one slot size: which go where, the newest first, and how many are dropped."""

    slot_bytes: int
    moves: list[tuple[_Place, _Place]]
    dropped: int


async def plan_to_read(root: Root, plan: RegionPlan) -> RegionPlan:
    """The regions that a root may hold blocks in: those of `plan`, or more of the same size before it was shrunk.

    Raises OSError. A superblock that states more regions than the disk holds bytes for is not followed.
    """
    stored = root.stored
    if stored is None or stored.stride != plan.stride or stored.regions <= plan.regions:
        return plan
    held = await root.call(root.folder.slab_bytes)
    believed = min(stored.regions, held // plan.stride + REGIONS_PER_FILE)
    return replace(plan, regions=max(plan.regions, believed))


async def shrink(root: Root, plan: RegionPlan) -> str:
    """Bring a root that was read within `plan`. Returns a note; empty if it has no more regions than that.

    Raises RootError or OSError.
    """
    if root.plan.regions <= plan.regions:
        return ""
    dropped, deadline = 0, asyncio.get_running_loop().time() + MOVE_SECONDS
    for choice in _choices(root, plan.regions):
        dropped += choice.dropped
        moves, count = choice.moves, max(1, min(_BATCH_MAX, _BATCH_BYTES // choice.slot_bytes))
        buffers = HeaderPages(min(count, len(moves)), choice.slot_bytes).pages
        for at in range(0, len(moves), count):
            if asyncio.get_running_loop().time() >= deadline:
                dropped += len(moves) - at
                break
            dropped += await _move(root, choice.slot_bytes, moves[at : at + count], buffers)
    root.forget_from(plan)
    await root.write_superblock(replace(root.superblock, regions=plan.regions))
    await root.call(root.folder.trim, plan)
    return f"{root.path}: {dropped} blocks were evicted to keep the capacity, the oldest first"


def _choices(root: Root, regions: int) -> Iterator[_Choice]:
    """Our newest blocks stay, then the newest of other namespaces, as many as the regions that stay have room for."""
    room: dict[int, list[_Place]] = {}
    for region, slots in root.slot_map.regions():
        if region < regions:
            places = room.setdefault(root.regions[region].slot_bytes, [])
            places += (_Place(region, index) for index in range(len(slots.keys)))
    for size, aged in _by_age(root, regions).items():
        places = room.get(size, [])
        kept = aged[: len(places)]
        taken = set(kept)
        free = (place for place in places if place not in taken)
        moves = list(zip((place for place in kept if place.region >= regions), free, strict=False))
        yield _Choice(size, moves, len(aged) - len(kept))


def _by_age(root: Root, regions: int) -> dict[int, list[_Place]]:
    """Where the blocks of each slot size are, ours before others', the newest first. Each key of a namespace once: its
    newest copy, of equal ones the one in a region that stays."""
    newest: dict[tuple[int, bytes | None], tuple[bool, int, bool, _Place]] = {}
    for region, slots in root.slot_map.regions():
        for index, (owner, key) in enumerate(zip(slots.owners, slots.keys, strict=True)):
            if owner != NO_OWNER:
                age = owner == root.slot_map.own, slots.generations[index], region < regions, _Place(region, index)
                newest[owner, key] = max(age, newest.get((owner, key), age))
    sizes: dict[int, list[_Place]] = {}
    for *_, place in sorted(newest.values(), reverse=True):
        sizes.setdefault(root.regions[place.region].slot_bytes, []).append(place)
    return sizes


async def _move(
    root: Root, slot_bytes: int, moves: Sequence[tuple[_Place, _Place]], buffers: Sequence[memoryview]
) -> int:
    """Move blocks, headers and payloads. Returns how many of them are lost, because the disk failed."""
    views = list(buffers[: len(moves)])
    read = await root.io.move(IOKind.READ, views, [_at(root, source, slot_bytes) for source, _ in moves])
    writing = []
    for view, error, (source, target) in zip(views, read, moves, strict=True):
        page = view[: root.plan.header_bytes]
        header = None if error else decode_slot_header(page)
        if header is None or (header.region, header.slot_index) != source:
            continue
        generation = root.regions[target.region].generation
        header = header._replace(region=target.region, slot_index=target.index, region_generation=generation)
        encode_slot_header(header, page)
        root.slot_map.begin_all(target.region, (target.index,))
        writing.append((view, header, _at(root, target, slot_bytes)))
    written = await root.io.move(IOKind.WRITE, [view for view, *_ in writing], [place for *_, place in writing])
    for (_, header, _), error in zip(writing, written, strict=True):
        if not error:
            root.slot_map.record(header)
    return len(moves) - written.count(0)


def _at(root: Root, place: _Place, slot_bytes: int) -> tuple[int, int]:
    fd = root.fds[root.plan.file_of(place.region)]
    return fd, root.plan.slot_offset(place.region, place.index, slot_bytes)

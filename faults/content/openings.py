"""One random bit in a root, which is then checked by fsck and opened anew: what is missed, and what fsck reports."""

from __future__ import annotations

import random
from dataclasses import dataclass

from kvtier.errors import RootError
from kvtier.tier.inspection import Access
from kvtier_fs.format.superblock import COPY_BYTES, decode_superblock
from kvtier_fs.inspect.local import LocalInspection
from kvtier_fs.inspect.shared import SharedInspection

from ..attack import Tally
from .stored import HEADER, PAYLOAD, SLOT, Found, Stored, found_in


@dataclass(frozen=True, slots=True)
class _Place:
    """Where an opening finds a flipped bit, and what must follow.

    `gone`: the blocks that are missed; None: all of them, or the root is refused. `reported`: fsck calls it damage.
    """

    name: str
    file: str
    first: int
    end: int
    gone: frozenset[bytes] | None = frozenset()
    reported: bool = True


def opened_anew(tally: Tally, rng: random.Random, root: Stored, count: int) -> None:
    """Flip bits in one place after the other, each in a root as it was written."""
    for number in range(count):
        places = _slab_places(rng, root) if root.layout == "slab" else _files_places(rng, root)
        place = places[number % len(places)]
        data = bytearray(root.pristine[place.file])
        copies = 2 if place.gone is None and place.name.startswith(("superblock", "epoch")) else 1
        for copy in range(copies):
            at = rng.randrange(place.first, place.end) + copy * (len(data) // 2)
            data[at] ^= 1 << rng.randrange(8)
        (root.root / place.file).write_bytes(data)
        damage = _fsck(root)
        now = found_in(root.layout, root.root, root.names)
        _judge_opening(tally, root, place, now)
        tally.expect(
            damage is None or bool(damage) == place.reported, f"{root.layout}, {place.name}: fsck reported {damage}"
        )
        tally.notes[f"opened anew: {root.layout} {place.name}"] += 1
        root.restore()
    tally.iterations += count


def _judge_opening(tally: Tally, root: Stored, place: _Place, now: Found) -> None:
    where = f"{root.layout}, {place.name}"
    tally.hangs += now.hung
    tally.wrong_bytes += len(now.wrong)
    tally.expect(not now.broken and not now.hung, f"{where}: ended with {now.broken or 'its deadline'}")
    if place.gone is None:
        tally.wrong_bytes += len(now.loaded)
        tally.expect(not now.loaded, f"{where}: {len(now.loaded)} blocks were loaded")
        return
    missed = set(root.names) - now.loaded
    tally.wrong_bytes += len(place.gone - missed)
    tally.expect(
        missed == place.gone and not now.refused, f"{where}: missed {len(missed)}, {now.refused} {now.statuses}"
    )


def _fsck(root: Stored) -> int | None:
    """How much damage fsck reports; None if it refuses the root, which is a report as well."""
    try:
        inspector = LocalInspection if root.layout == "slab" else SharedInspection
        store = inspector.inspect(str(root.root), Access.CHECK)
    except RootError:
        return None
    assert store is not None
    try:
        return sum(finding.kind.is_damage for step in store.check(False) for finding in step.findings)
    finally:
        store.close()


def _slab_places(rng: random.Random, root: Stored) -> list[_Place]:
    block = decode_superblock(root.pristine["superblock"])
    assert block is not None
    key = rng.choice(root.names)
    path, offset = root.places[key]
    slab, copy = root.name_of(path), rng.randrange(2) * COPY_BYTES
    region = offset // block.stride * block.stride
    inside = frozenset(
        one for one in root.names if root.places[one][0] == path and 0 <= root.places[one][1] - region < block.stride
    )
    free = _free_slot(root, slab)
    return [
        _Place("superblock, one copy", "superblock", copy, copy + COPY_BYTES),
        _Place("superblock, both copies", "superblock", 0, COPY_BYTES, None),
        _Place("region header", slab, region, region + HEADER, inside),
        _Place("snapshot", "snapshot", 0, len(root.pristine["snapshot"])),
        _Place("block's header", slab, offset, offset + HEADER, frozenset((key,))),
        _Place("block's payload", slab, offset + HEADER, offset + SLOT, frozenset((key,))),
        _Place("header page of a slot without a block", slab, free, free + HEADER),
        _Place("rest of a slot without a block", slab, free + HEADER, free + SLOT, reported=False),
        _Place("lock", "lock", 0, len(root.pristine["lock"]), reported=False),
        _Place("manifest", _manifest(root), 0, len(root.pristine[_manifest(root)]), reported=False),
    ]  # fmt: skip


def _free_slot(root: Stored, slab: str) -> int:
    """Where a slot begins that was never written, behind the last block of a region."""
    last = max(offset for path, offset in root.places.values() if root.name_of(path) == slab)
    data = root.pristine[slab]
    assert last + 2 * SLOT <= len(data)
    assert not any(data[last + SLOT : last + 2 * SLOT])
    return last + SLOT


def _manifest(root: Stored) -> str:
    return next(name for name in root.pristine if name.startswith("manifest-"))


def _files_places(rng: random.Random, root: Stored) -> list[_Place]:
    key = rng.choice(root.names)
    block = root.name_of(root.places[key][0])
    epoch = next(name for name in root.pristine if name.startswith("epochs/") and not name.endswith("lock"))
    account = rng.choice([name for name in root.pristine if name.endswith("/account")])
    copy = rng.randrange(2)
    return [
        _Place("superblock, one copy", "superblock", copy * COPY_BYTES, (copy + 1) * COPY_BYTES),
        _Place("superblock, both copies", "superblock", 0, COPY_BYTES, None),
        _Place("epoch, one copy", epoch, copy * 128, (copy + 1) * 128),
        _Place("epoch, both copies", epoch, 0, 128, None),
        _Place("account", account, 0, len(root.pristine[account])),
        _Place("block's header", block, 0, HEADER, frozenset((key,))),
        _Place("block's payload", block, HEADER, HEADER + PAYLOAD, frozenset((key,))),
        _Place("manifest", _manifest(root), 0, len(root.pristine[_manifest(root)]), reported=False),
    ]

"""One random bit at a time: in slots and files of blocks, in the records of a root, in unused bytes.

Every flip is checked on its own. Most are made in the mapped file, verified as every load verifies, and flipped back;
some go through a whole tier; some through a root that is opened anew, and through fsck.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvtier.tier.block_envelope import KEY_AT, Mismatch, SlotHeader, decode_slot_header, verify_slot
from kvtier_fs.format.region_header import decode_region_header
from kvtier_fs.format.snapshot import decode_snapshot
from kvtier_fs.format.superblock import COPY_BYTES, decode_superblock, foreign_version
from kvtier_fs.format.tree_records import decode_account, decode_epoch, decode_tree, encode_lease
from kvtier_fs.inspect.store import payload_fault
from kvtier_fs.shared.block_file import ExpectedBlock, check_block
from kvtier_fs.shared.leases import decode_holder
from kvtier_fs.shared.paths import BlockPlace

from ..attack import Budget, Tally
from .openings import opened_anew
from .stored import DEADLINE_SECONDS, HEADER, LAYOUTS, PAGE_BYTES, SLOT, Found, Stored, held, load, opened, run, stored

BLOCKS = 64
KEY_BYTES = 36
FSCK_EVERY = 16
TIER_BLOCKS = 48
OPENINGS_MIN = 20
PARTS = (
    ("header", 0, KEY_AT),
    ("key", KEY_AT, KEY_AT + KEY_BYTES),
    ("rest of the header page", KEY_AT + KEY_BYTES, HEADER),
    ("payload", HEADER, HEADER + PAGE_BYTES),
    ("padding", HEADER + PAGE_BYTES, SLOT),
)
"""The parts of a block on the disk, in bytes; each gets a share of the flips, whatever its size."""


@dataclass(frozen=True, slots=True)
class Shares:
    """How many flips are made in which way, of all and for each layout."""

    in_place: int
    records: int
    tier_rounds: int
    openings: int

    @classmethod
    def of(cls, count: int) -> Shares:
        """A tenth in records, a few rounds of 48 through a tier, one opening for each thousand; the rest in place."""
        half = count // 2
        openings = max(OPENINGS_MIN, half // 1000)
        rounds = max(1, half // 32 // TIER_BLOCKS)
        records = half // 10
        return cls(max(1, half - openings - rounds * TIER_BLOCKS - records), records, rounds, openings)


def bit_flips(budget: Budget) -> Tally:
    """All shares, on both layouts."""
    tally, before, shares = Tally(), held(), Shares.of(budget.count)
    for layout in LAYOUTS:
        rng = random.Random(f"{layout}/{budget.seed}")
        root = stored(layout, budget.folder / layout, BLOCKS)
        _unused_is_zero(tally, root)
        _in_place(tally, rng, root, shares.in_place)
        _in_records(tally, rng, root, shares.records)
        _through_a_tier(tally, rng, root, shares.tier_rounds)
        root.restore()
        opened_anew(tally, rng, root, shares.openings)
    left = [now - was for now, was in zip(held(), before, strict=True)]
    tally.leaks += sum(max(0, more) for more in left)
    for part, _, _ in PARTS:
        tally.expect(tally.notes[f"in {part}"] * 10 > shares.in_place, f"hardly a flip in {part}")
    return tally


def _unused_is_zero(tally: Tally, root: Stored) -> None:
    """What a block does not use of its place is zero on the disk."""
    for key in root.names:
        path, offset = root.places[key]
        data = root.pristine[root.name_of(path)][offset : offset + SLOT]
        unused = data[KEY_AT + len(key) : HEADER] + data[HEADER + PAGE_BYTES : SLOT]
        tally.expect(len(data) == SLOT and len(key) == KEY_BYTES and not any(unused), "unused bytes are not zero")


# ---- in the mapped file


@contextmanager
def _mapped(path: Path) -> Iterator[tuple[memoryview, int]]:
    """A file's bytes, to be changed in place, and its descriptor."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        with mmap.mmap(fd, 0) as mapping, memoryview(mapping) as view:
            yield view, fd
    finally:
        os.close(fd)


def _in_place(tally: Tally, rng: random.Random, root: Stored, count: int) -> None:
    """Flip bits of blocks in their files; verify as a load does, and now and then as recovery and fsck do."""
    each, more = divmod(count, len(root.names))
    for number, key in enumerate(root.names):
        path, offset = root.places[key]
        with _mapped(path) as (view, fd), view[offset : offset + SLOT] as slot:
            _flip_slot(tally, rng, _Slot(slot, fd, offset, _verifier(root, path, slot)), each + (number < more))


@dataclass(frozen=True, slots=True)
class _Slot:
    view: memoryview
    fd: int
    offset: int
    verify: Callable[[], Mismatch | bytes]


def _verifier(root: Stored, path: Path, slot: memoryview) -> Callable[[], Mismatch | bytes]:
    """The verification of a load of this layout, of what the slot holds at the moment."""
    page, payload = slot[:HEADER], slot[HEADER:]
    stated = decode_slot_header(page)
    assert stated is not None
    expected = stated._replace(payload_digest=b"")
    if root.layout == "slab":
        return lambda: verify_slot(page, payload, expected)
    wanted = ExpectedBlock(BlockPlace(expected.region, "", path.name), expected._replace(generation=0), SLOT)
    return lambda: check_block(page, payload, wanted).found


def _flip_slot(tally: Tally, rng: random.Random, slot: _Slot, count: int) -> None:
    view, verify = slot.view, slot.verify
    page = view[:HEADER]
    good = verify()
    tally.expect(isinstance(good, bytes) and not isinstance(good, Mismatch), "a block is not whole before any flip")
    for number in range(count):
        part, first, end = PARTS[rng.randrange(len(PARTS))]
        at, bit = rng.randrange(first, end), 1 << rng.randrange(8)
        view[at] ^= bit
        found = verify()
        recovered = at < HEADER and decode_slot_header(page) is not None
        checked = number % FSCK_EVERY == 0 and at >= HEADER and not _fsck_sees(slot)
        view[at] ^= bit
        missed = not isinstance(found, Mismatch)
        if missed or recovered or checked:
            tally.wrong_bytes += missed
            tally.expect(
                False, f"bit {bit} of byte {at}: loaded {missed}, recovered {recovered}, hidden from fsck {checked}"
            )
        else:
            tally.notes[f"refused: {found}"] += 1
        tally.notes[f"in {part}"] += 1
    tally.iterations += count
    tally.notes["in the mapped file"] += count
    tally.expect(verify() == good, "a block is not whole after all flips were undone")


def _fsck_sees(slot: _Slot) -> bool:
    """Whether fsck's reading of the payload, through the file and not the mapping, finds a fault."""
    header: SlotHeader | None = decode_slot_header(slot.view[:HEADER])
    return header is None or bool(payload_fault(slot.fd, slot.offset + HEADER, header))


# ---- in what a root says of itself


@dataclass(frozen=True, slots=True)
class _Record:
    """Bytes of a root, and whether it is harmless that they are as they are now."""

    name: str
    whole: bytes
    harmless: Callable[[bytes], bool]


def _in_records(tally: Tally, rng: random.Random, root: Stored, count: int) -> None:
    """Flip bits of superblock, region headers, snapshot, epochs, accounts, leases; read them as an open tier does."""
    records = _slab_records(root) if root.layout == "slab" else _files_records(root)
    for number in range(count):
        record = records[number % len(records)]
        at, bit = rng.randrange(len(record.whole)), 1 << rng.randrange(8)
        if not record.harmless(_flipped(record.whole, at, bit)):
            tally.wrong_bytes += 1
            tally.expect(False, f"{record.name}: bit {bit} of byte {at} is believed")
        tally.notes[f"in {record.name}"] += 1
    tally.iterations += count
    tally.notes["in records"] += count


def _flipped(data: bytes, at: int, bit: int) -> bytes:
    return b"".join((data[:at], bytes((data[at] ^ bit,)), data[at + 1 :]))


def _slab_records(root: Stored) -> list[_Record]:
    data = root.pristine["superblock"]
    block = decode_superblock(data)
    assert block is not None
    slab = root.pristine["slab-00000"]
    assert decode_snapshot(root.pristine["snapshot"], block) is not None
    assert decode_region_header(memoryview(slab)[:HEADER]) is not None
    return [
        _Record("superblock", data, lambda now: decode_superblock(now) == block and foreign_version(now) is None),
        _Record("superblock, its last copy", data[:COPY_BYTES], lambda now: decode_superblock(now) is None),
        _Record("region header", slab[:HEADER], lambda now: decode_region_header(memoryview(now)) is None),
        _Record("snapshot", root.pristine["snapshot"], lambda now: decode_snapshot(now, block) is None),
    ]


def _files_records(root: Stored) -> list[_Record]:
    data = root.pristine["superblock"]
    tree = decode_tree(data)
    assert tree is not None
    epoch = next(name for name in root.pristine if name.startswith("epochs/") and not name.endswith("lock"))
    account = next(name for name in root.pristine if name.endswith("/account"))
    namespace, number = bytes.fromhex(epoch.removeprefix("epochs/")), int(account[7:9], 16)
    lease = encode_lease('{"host": "h", "boot": "b", "pid_namespace": 1, "pid": 1, "started": 1}')
    epochs = root.pristine[epoch]
    assert decode_epoch(epochs, namespace) == 0
    assert decode_account(root.pristine[account], tree, number) is not None
    assert decode_holder(lease) is not None
    return [
        _Record("superblock", data, lambda now: decode_tree(now) == tree),
        _Record("superblock, its last copy", data[:COPY_BYTES], lambda now: decode_tree(now) is None),
        _Record("epoch", epochs, lambda now: decode_epoch(now, namespace) == 0),
        _Record("epoch, its last copy", epochs[: len(epochs) // 2], lambda now: decode_epoch(now, namespace) is None),
        _Record("account", root.pristine[account], lambda now: decode_account(now, tree, number) is None),
        _Record("lease", lease, lambda now: decode_holder(now) is None),
    ]


# ---- through a whole tier


def _through_a_tier(tally: Tally, rng: random.Random, root: Stored, rounds: int) -> None:
    """Flip one bit in each of 48 blocks of an open tier and load all of them, again and again."""
    found = Found()

    async def work() -> None:
        async with opened(root.layout, root.root) as tier:
            for _ in range(rounds):
                flipped = rng.sample(root.names, TIER_BLOCKS)
                for key in flipped:
                    _damage(rng, root, key)
                now = Found()
                async with asyncio.timeout(DEADLINE_SECONDS):
                    await load(tier, root.names, now)
                _judge_round(tally, root, set(flipped), now)
                for key in flipped:
                    _mend(root, key)

    run(found, work, rounds + 2)
    tally.hangs += found.hung
    tally.expect(not (found.refused or found.broken or found.hung), f"a tier ended with {found}")


def _judge_round(tally: Tally, root: Stored, flipped: set[bytes], now: Found) -> None:
    tally.wrong_bytes += len(now.wrong | (now.loaded & flipped))
    tally.expect(now.loaded == set(root.names) - flipped, f"{now.statuses} where {len(flipped)} were flipped")
    tally.expect(now.statuses["corrupt"] == len(flipped), f"{now.statuses} where {len(flipped)} were flipped")
    tally.iterations += len(flipped)
    tally.notes["through a whole tier"] += len(flipped)


def _damage(rng: random.Random, root: Stored, key: bytes) -> None:
    path, offset = root.places[key]
    _, first, end = PARTS[rng.randrange(len(PARTS))]
    at, bit = offset + rng.randrange(first, end), 1 << rng.randrange(8)
    good = root.pristine[root.name_of(path)]
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        os.pwrite(fd, bytes([good[at] ^ bit]), at)
    finally:
        os.close(fd)


def _mend(root: Stored, key: bytes) -> None:
    """Write a block as it was: in place in a slab; as a new file where a load removed the damaged one."""
    path, offset = root.places[key]
    good = root.pristine[root.name_of(path)][offset : offset + SLOT]
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.pwrite(fd, good, offset)
    finally:
        os.close(fd)

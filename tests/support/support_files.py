"""shared_fs tiers for tests: rows, jobs without slots, and a look at the folder from outside."""

from __future__ import annotations

import fcntl
import os
import stat
import time
from collections.abc import Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

import numpy as np
import xxhash
from support_fs import PAGE, TestRows, flat, layout, payload

from kvtier.tier.contract import LookupResult, Opened, TierContext
from kvtier.types.geometry import Geometry, KVLayout
from kvtier.types.jobs import BlockOutcome, JobKind, RowGroup, TransferJob
from kvtier.types.keys import GroupIndex, JobId, OffloadKey, key_group
from kvtier.types.namespace import Namespace
from kvtier_fs import SharedFSBackend, SharedFSOptions
from kvtier_fs.format.tree_records import Tree, decode_account, decode_tree
from kvtier_fs.shared.paths import BLOCK_NAME
from kvtier_fs.shared.root import FilesHooks


class FilesTier:
    """An open tier with its rows. A block's payload follows from its key and a version that tests choose (0)."""

    def __init__(self, backend: SharedFSBackend, opened: Opened, rows: TestRows, geometry: Geometry) -> None:
        self.backend = backend
        self.opened = opened
        self.rows = rows
        self.geometry = geometry
        self.epoch = opened.epoch
        self.jobs = 0

    @property
    def counters(self):
        return self.backend.counters

    def fill(self, row: int, key: OffloadKey, version: int = 0) -> None:
        """Put a key's payload and checksum into a row."""
        length = self.geometry.aligned_bytes(key_group(key))
        self.rows.view[row, :length] = payload(key, version, length)
        self.rows.view[row, length:] = 0
        self.rows.digests[row] = xxhash.xxh3_128(self.rows.view[row, :length]).digest()

    def holds(self, row: int, key: OffloadKey, version: int = 0) -> bool:
        """True if a row holds a key's payload."""
        length = self.geometry.aligned_bytes(key_group(key))
        return bool(np.array_equal(self.rows.view[row, :length], payload(key, version, length)))

    def job(self, kind: JobKind, names: Sequence[OffloadKey], deadline: float | None = None) -> TransferJob:
        """A job over keys of one group and rows 0.. in order."""
        self.jobs += 1
        transfer = RowGroup(GroupIndex(key_group(names[0])), tuple(names), range(len(names)))
        return TransferJob(JobId(self.jobs), kind, (transfer,), deadline, self.epoch)

    async def store(self, names: Sequence[OffloadKey], version: int = 0) -> list[BlockOutcome]:
        """Store keys of one group, as many as there are rows at a time."""
        outcomes = []
        for start in range(0, len(names), self.rows.num_rows):
            batch = names[start : start + self.rows.num_rows]
            for row, key in enumerate(batch):
                self.fill(row, key, version)
            outcomes += flat(await self.backend.store(self.job(JobKind.STORE, batch)))
        return outcomes

    async def load(self, names: Sequence[OffloadKey], version: int = 0) -> list[BlockOutcome]:
        """Load keys of one group; every block that counts as loaded is compared with what it must be."""
        outcomes = []
        for start in range(0, len(names), self.rows.num_rows):
            batch = names[start : start + self.rows.num_rows]
            self.rows.view[: len(batch)] = 0xEE
            ended = flat(await self.backend.load(self.job(JobKind.LOAD, batch)))
            for row, (key, outcome) in enumerate(zip(batch, ended, strict=True)):
                assert not outcome.ok or self.holds(row, key, version), f"wrong bytes under {key.hex()}"
            outcomes += ended
        return outcomes

    async def present(self, names: Sequence[OffloadKey]) -> int:
        """How many of these keys a lookup finds."""
        return sum(found is LookupResult.HIT for found in await self.backend.lookup(names))

    def path(self, key: OffloadKey) -> Path:
        """Where a key's file lies."""
        place = self.backend._expect(key, self.epoch).place
        return Path(self.backend.options.root) / f"bucket-{place.bucket:02x}" / place.leaf / place.name


def options(root: Path, **changes: object) -> SharedFSOptions:
    """Options for small tests: buffered threads unless told otherwise."""
    fields = {"root": str(root), "capacity": 8 << 20, "min_free_bytes": 0, "direct": "off"}
    return SharedFSOptions.model_validate(fields | {"io_engine": "threads", "io_threads": 4} | changes)


@asynccontextmanager
async def open_files(
    settings: SharedFSOptions,
    shape: KVLayout | None = None,
    *,
    tag: str = "",
    rows: int = 32,
    hooks: FilesHooks | None = None,
    alignment: int = PAGE,
    new_epoch: int | None = None,
):
    """An open tier, closed at the end. A busy machine is no reason for it to give up on a lock."""
    geometry = Geometry(shape or layout(16384), alignment)
    region = TestRows(rows, geometry.row_bytes)
    backend = SharedFSBackend(settings, hooks or FilesHooks(lock_seconds=60))
    context = TierContext(
        "fs", geometry, Namespace(geometry.layout, tag=tag), time.monotonic, rows=region, new_epoch=new_epoch
    )
    try:
        opened = await backend.open(context)
        yield FilesTier(backend, opened, region, geometry)
    finally:
        await backend.close()


def block_files(root: Path) -> list[Path]:
    """Every block's file under a root."""
    found = (Path(folder) / name for folder, _, names in os.walk(root) for name in names if BLOCK_NAME.fullmatch(name))
    return sorted(found)


def temporaries(root: Path) -> list[Path]:
    """Every temporary under a root."""
    return sorted(
        Path(folder) / name for folder, _, names in os.walk(root) for name in names if name.startswith("new-")
    )


def disk_bytes(root: Path) -> int:
    """What a root occupies now, as the file system counts it, folders included; others may be at work in it."""
    total = 0
    for folder, _, names in os.walk(root):
        for path in [folder, *(os.path.join(folder, name) for name in names)]:
            try:
                total += os.lstat(path).st_blocks * 512
            except FileNotFoundError:
                continue
    return total


@contextmanager
def bucket_locked(folder: Path):
    """Nobody changes this bucket meanwhile."""
    fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _looked_at(folder: Path) -> dict[int, os.stat_result]:
    """Everything in a bucket that nobody else has the lock of: temporaries may get their names, no more than that."""
    seen: list[dict[int, os.stat_result]] = [{}]
    while len(seen) < 2 or seen[-1].keys() != seen[-2].keys():
        found = {}
        for path in [folder, *folder.rglob("*")]:
            with suppress(FileNotFoundError):
                status = path.lstat()
                found[status.st_ino] = status
        seen.append(found)
    return seen[-1]


def account_error(folder: Path, tree: Tree) -> int | None:
    """By how many bytes a bucket's account says more than the bucket holds, None if it has none.

    Looked at under the bucket's lock. What its folders grew by since the last count has room set aside: no error.
    """
    with bucket_locked(folder):
        try:
            data = (folder / "account").read_bytes()
        except FileNotFoundError:
            return None
        statuses = _looked_at(folder).values()
    said = decode_account(data, tree, int(folder.name[-2:], 16))
    assert said is not None, f"{folder.name} has a damaged account"
    held = sum(status.st_blocks * 512 for status in statuses)
    grown = sum(max(0, status.st_blocks * 512 - 4096) for status in statuses if stat.S_ISDIR(status.st_mode))
    return said - held if said > held else min(0, said - held + grown)


def account_errors(root: Path) -> dict[str, int]:
    """`account_error` of every bucket of a root that has an account."""
    tree = decode_tree((root / "superblock").read_bytes())
    errors = {folder.name: account_error(folder, tree) for folder in sorted(root.glob("bucket-*"))}
    return {name: error for name, error in errors.items() if error is not None}


def account_is_true(tier: FilesTier) -> bool:
    """True if there are accounts and each says exactly what its bucket holds."""
    errors = account_errors(Path(tier.backend.options.root))
    assert not any(errors.values()), errors
    return bool(errors)

"""Transfers that end short, and direct I/O that is refused or only pretended."""

from __future__ import annotations

import asyncio
import os
import random
import re
import resource
import shutil
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtier.aio.daemon_pool import DaemonPool
from kvtier.errors import RootError
from kvtier.types.geometry import Geometry
from kvtier.types.jobs import BlockOutcome, BlockStatus
from kvtier_fs import FSBackend, SharedFSBackend
from kvtier_fs.io.contract import IOEngine, IOKind, IORequest
from kvtier_fs.io.threads import ThreadsEngine
from kvtier_fs.shared.root import FilesHooks

from ..attack import Attack, Budget, Tally
from ..machine.belongings import belongings, left_behind
from ..machine.cached import cached_bytes
from ..machine.loops import MIB, ext4, loop_device, mounted, without_loops
from ..machine.undo import Machine, run

LAYOUTS = ("slab", "files")
PAYLOAD_BYTES = 65536


class Tiers:
    """One way to open, fill and read a root of either layout, whatever it lies on; wrong bytes are counted."""

    def __init__(self, tally: Tally) -> None:
        self.tally = tally

    @asynccontextmanager
    async def open(self, root: Path, layout: str, hooks: Any = None, **changes: Any) -> AsyncIterator[Any]:
        """An open tier, closed at the end."""
        import support_files
        import support_fs

        shape = support_fs.layout(PAYLOAD_BYTES)
        if layout == "slab":
            settings = support_fs.options(root, **changes)
            async with support_fs.open_tier(settings, shape, hooks=hooks) as tier:
                yield tier
        else:
            async with support_files.open_files(support_files.options(root, **changes), shape, hooks=hooks) as tier:
                yield tier

    async def store(self, tier: Any, names: Sequence[bytes]) -> list[BlockOutcome]:
        """Store keys; in a slab into regions that are formatted for them if need be."""
        if not hasattr(tier, "store_all"):
            return await tier.store(names)
        formats = []
        while sum(1 for _ in tier.free_slots(0)) < len(names):
            formats.append(tier.format_region(len(tier.region_sizes), 0))
        return await tier.store(names, formats)

    async def load(self, tier: Any, names: Sequence[bytes]) -> list[BlockOutcome]:
        """Load keys; none if a byte of what was said to be loaded is wrong, which is counted."""
        known = [name for name in names if name in getattr(tier, "directory", names)]
        try:
            return await (tier.load_all if hasattr(tier, "load_all") else tier.load)(known)
        except AssertionError as error:
            self.tally.wrong_bytes += 1
            self.tally.expect(False, str(error))
            return []


def ok(outcomes: Sequence[BlockOutcome]) -> bool:
    """True if all of these blocks were stored or loaded."""
    return bool(outcomes) and all(outcome.ok for outcome in outcomes)


# ---- direct I/O that is absent or fake


@dataclass(frozen=True, slots=True)
class Place:
    """A kind of file system: how it is mounted, and whether direct I/O is real there (None: whatever it says)."""

    name: str
    mount: Callable[[Machine, Path, ExitStack], Path]
    direct: bool | None


def _ext4(mkfs: str = "", options: str = "", losetup: str = "") -> Callable[[Machine, Path, ExitStack], Path]:
    return lambda machine, folder, undo: (
        undo.enter_context(ext4(machine, folder, mkfs=tuple(mkfs.split()), options=options, losetup=losetup)).mount
    )


def _in_memory(kind: str) -> Callable[[Machine, Path, ExitStack], Path]:
    return lambda machine, folder, undo: undo.enter_context(mounted(kind, kind, folder))


def _overlay(machine: Machine, folder: Path, undo: ExitStack) -> Path:
    below = undo.enter_context(ext4(machine, folder)).mount
    for name in ("lower", "upper", "work"):
        (below / name).mkdir()
    options = f"lowerdir={below}/lower,upperdir={below}/upper,workdir={below}/work"
    return undo.enter_context(mounted("overlay", "overlay", folder / "merged", options))


def _large(kind: str, mib: int) -> Callable[[Machine, Path, ExitStack], Path]:
    def mount(machine: Machine, folder: Path, undo: ExitStack) -> Path:
        folder.mkdir(parents=True)
        with open(folder / "image", "wb") as file:
            file.truncate(mib * MIB)
        device = undo.enter_context(loop_device(machine, folder / "image"))
        run(f"mkfs.{kind}", "-q", device)
        return undo.enter_context(mounted(kind, device, folder / "mount"))

    return mount


PLACES = (
    Place("ext4", _ext4(), True),
    Place("ext4 data=journal", _ext4(options="data=journal"), False),
    Place("ext4 on 4 KiB sectors", _ext4(losetup="--sector-size 4096"), True),
    Place("tmpfs", _in_memory("tmpfs"), False),
    Place("ramfs", _in_memory("ramfs"), False),
    Place("overlayfs", _overlay, None),
    Place("xfs", _large("xfs", 320), True),
    Place("btrfs", _large("btrfs", 128), None),
)


def direct_io(budget: Budget) -> Tally:
    """Each file system in turn, both layouts: right bytes, and the truth about the page cache."""
    tally = Tally()
    there = [each for each in PLACES if not each.name.endswith("fs") or _can_make(each.name)]
    with Machine() as machine:
        for number in range(budget.count):
            place, folder, before = there[number % len(there)], budget.folder / str(number), belongings()
            folder.mkdir()
            with ExitStack() as undo:
                mount = place.mount(machine, folder / "disk", undo)
                for layout in LAYOUTS:
                    asyncio.run(_truth(tally, place, layout, mount / layout))
            left = left_behind(before)
            tally.leaks += len(left)
            tally.expect(not left, f"{place.name}: left behind: {left}")
            tally.iterations += 1
    tally.expect(len(there) >= 6, f"only {len(there)} kinds of file systems can be made here")
    return tally


def _can_make(name: str) -> bool:
    return name in ("tmpfs", "ramfs", "overlayfs") or shutil.which(f"mkfs.{name}") is not None


async def _truth(tally: Tally, place: Place, layout: str, root: Path) -> None:
    from support_fs import keys

    tiers, names, what = Tiers(tally), keys(16), f"{place.name}, {layout}"
    changes: dict[str, Any] = {"direct": "auto", "io_engine": "auto"}
    for life in range(2):
        async with tiers.open(root, layout, **changes) as tier:
            mode = tier.opened.mode
            tally.expect(life > 0 or ok(await tiers.store(tier, names)), f"{what}: {mode}: not stored")
            tally.expect(ok(await tiers.load(tier, names)), f"{what}: {mode}: not loaded in life {life}")
    direct = mode.endswith("direct")
    cached = cached_bytes(_block_files(root))
    really = cached < len(names) * PAYLOAD_BYTES // 2
    tally.expect(direct is really, f"{what}: says {mode}, {cached} bytes in the page cache")
    tally.expect(place.direct in (None, direct), f"{what}: {mode}")
    tally.notes[f"roots that said {mode.split(', ')[-1]}"] += 1
    try:
        async with tiers.open(root, layout, direct="required"):
            tally.expect(direct, f"{what}: direct: required was accepted")
    except RootError as error:
        tally.expect(not direct and "direct I/O" in str(error), f"{what}: {error}")
    tally.expect(_dry_mode(root, layout).endswith(mode.split(", ")[-1]), f"{what}: kvtier check says another mode")


def _block_files(root: Path) -> list[Path]:
    names = re.compile(r"slab-|[0-9a-f]{32}")
    return [path for path in root.rglob("*") if names.match(path.name) and path.is_file()]


def _dry_mode(root: Path, layout: str) -> str:
    """What `kvtier check` says of a root."""
    from support_files import options as files_options
    from support_fs import PAGE
    from support_fs import layout as shape
    from support_fs import options as slab_options

    settings = (slab_options if layout == "slab" else files_options)(root, direct="auto")
    backend = FSBackend if layout == "slab" else SharedFSBackend
    return str(backend(settings).dry_run(Geometry(shape(PAYLOAD_BYTES), PAGE), probe=True).mode)


# ---- transfers that end short


@contextmanager
def file_size_limits() -> Iterator[Callable[[int], None]]:
    """What sets the offset that no file of this process is written at or past: writes that reach it end short."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        yield lambda limit: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def short_transfers(budget: Budget) -> Tally:
    """Writes truncated by a file size limit, reads of a file that lost its tail; then the fault is lifted."""
    tally, rng = Tally(), random.Random(budget.seed)
    before = belongings()
    for number in range(budget.count):
        root, changes = budget.folder / str(number), {"direct": rng.choice(["auto", "off"])}
        end = int(PAYLOAD_BYTES * rng.random()) // (512 if number % 3 else 1) * (512 if number % 3 else 1)
        if number % 4 < 2:
            changes["io_engine"] = rng.choice(["auto", "threads"])
            asyncio.run(_short_in_slab(tally, root, number % 2 == 0, 4096 + end, changes))
        else:
            asyncio.run(_short_in_files(tally, root, number % 2 == 0, 4096 + end, changes))
        tally.iterations += 1
        shutil.rmtree(root)
    left = left_behind(before)
    tally.leaks += len(left)
    tally.expect(not left, f"left behind: {left}")
    tally.expect(tally.notes["blocks failed"] >= budget.count, "hardly a block failed")
    return tally


async def _short_in_slab(tally: Tally, root: Path, writing: bool, end: int, changes: dict[str, Any]) -> None:
    from support_fs import keys, slot_place

    tiers, names, what = Tiers(tally), keys(8), f"slab, {'write' if writing else 'read'} ends at {end}, {changes}"
    async with tiers.open(root, "slab", **changes) as tier:
        tally.expect(ok(await tiers.store(tier, names[:4])), f"{what}: not stored before")
        path, offset = slot_place(tier, names[2])
        if writing:
            with file_size_limits() as limit:
                limit(offset + 3 * tier.space.slot_bytes[0] + end)
                outcomes = await tiers.store(tier, names[4:])
            await _judge_short(tally, tiers, tier, names[4:], outcomes, what)
        else:
            os.truncate(path, offset + end)
            outcomes = await tiers.load(tier, names[:4])
            _count_short(tally, tier, outcomes, what)
        tally.expect(ok(await tiers.store(tier, names[4:])), f"{what}: not stored once all was well")
        tally.expect(ok(await tiers.load(tier, names[4:])), f"{what}: not loaded once all was well")
    for scan in (False, True):
        (root / "snapshot").unlink(missing_ok=scan)
        async with tiers.open(root, "slab", **changes) as tier:
            await tiers.load(tier, names)


async def _short_in_files(tally: Tally, root: Path, writing: bool, end: int, changes: dict[str, Any]) -> None:
    from support_files import temporaries
    from support_fs import keys

    tiers, names, what = Tiers(tally), keys(8), f"files, {'write' if writing else 'read'} ends at {end}, {changes}"
    cutting = False

    def meddle(request: IORequest) -> None:
        if cutting and writing and request.kind is IOKind.WRITE:
            limit(end)
        elif cutting and request.kind is IOKind.READ:
            os.truncate(f"/proc/self/fd/{request.fd}", end)

    with file_size_limits() as limit:
        async with tiers.open(root, "files", FilesHooks(engine=lambda: Meddler(meddle)), **changes) as tier:
            tally.expect(ok(await tiers.store(tier, names[:4])), f"{what}: not stored before")
            cutting = True
            if writing:
                outcomes = await tiers.store(tier, names[4:])
                limit(resource.RLIM_INFINITY)
                await _judge_short(tally, tiers, tier, names[4:], outcomes, what)
            else:
                _count_short(tally, tier, await tiers.load(tier, names[:4]), what)
            cutting = False
            tally.expect(not temporaries(root), f"{what}: left temporaries")
            await tiers.load(tier, names)
            tally.expect(ok(await tiers.store(tier, names)), f"{what}: not stored once all was well")
            tally.expect(ok(await tiers.load(tier, names)), f"{what}: not loaded once all was well")


def _count_short(tally: Tally, tier: Any, outcomes: Sequence[BlockOutcome], what: str) -> None:
    bad = [outcome for outcome in outcomes if not outcome.ok]
    tally.expect(len(bad) > 0, f"{what}: nothing failed: {outcomes}")
    tally.expect(all(outcome.status in (BlockStatus.FAILED, BlockStatus.CORRUPT) for outcome in bad), f"{what}: {bad}")
    tally.notes["blocks failed"] += len(bad)
    tally.notes["transfers of the kernel that ended short"] += tier.backend.counters["io.short"]


async def _judge_short(
    tally: Tally, tiers: Tiers, tier: Any, names: Sequence[bytes], outcomes: Sequence[BlockOutcome], what: str
) -> None:
    """What failed is not visible, what did not is whole."""
    _count_short(tally, tier, outcomes, what)
    good = [name for name, outcome in zip(names, outcomes, strict=True) if outcome.ok]
    bad = [name for name, outcome in zip(names, outcomes, strict=True) if not outcome.ok]
    if good:
        tally.expect(ok(await tiers.load(tier, good)), f"{what}: what was stored was not loaded")
    seen = [outcome for outcome in await tiers.load(tier, bad) if outcome.ok] if bad else []
    tally.expect(not seen, f"{what}: {len(seen)} blocks that failed are visible")


class Meddler(IOEngine):
    """The real engine, but something is done to the disk right before each request is handed to it."""

    name = "meddled"

    def __init__(self, before: Callable[[IORequest], None]) -> None:
        self._threads = DaemonPool("meddler", 2)
        self._engine = ThreadsEngine(asyncio.get_running_loop(), self._threads, 2)
        self._engine.open()
        self._before = before

    @property
    def in_flight(self) -> int:
        return self._engine.in_flight

    def submit(self, requests: Sequence[IORequest]) -> None:
        for request in requests:
            self._before(request)
        self._engine.submit(requests)

    async def close(self, timeout_seconds: float) -> int:
        return await self._engine.close(timeout_seconds) + await self._threads.close(timeout_seconds)


ATTACKS = (
    Attack(
        "direct I/O",
        "file systems that refuse O_DIRECT, that accept it and buffer, and that honour it",
        6,
        8,
        direct_io,
        missing=without_loops,
    ),
    Attack("short transfers", "RLIMIT_FSIZE under writes, ftruncate under reads", 10, 200, short_transfers),
)

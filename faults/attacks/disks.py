"""Disks that are full, out of inodes, failing, slow, hung or frozen: real ones, made of loop devices and FUSE."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from ..attack import Attack, Budget, Tally
from ..driven import CAPACITY_BYTES, PAGE_BYTES, POLICIES, Engine, driven
from ..machine.belongings import belongings, left_behind
from ..machine.fuse import READS, WRITES, Switch, ext4_behind_a_switch, switched, without_bad_disks
from ..machine.loops import Disk, ext4, file_system, without_loops
from ..machine.undo import Machine
from ..machine.watch import Bound

MIB = 1 << 20
LAYOUTS = ("slab", "files")
RECOVER_SECONDS = 60.0
FELT_SECONDS = 0.005
OVERWRITTEN_LOOKS = 4
METADATA_BYTES = 4096
"""What a file system may keep of each block file beside its blocks: inode, names, extents; btrfs keeps them twice."""
_OVERWRITTEN = "blocks overwritten several times in two lives of a root, `statfs` compared with the capacity:"
SHORT_PAUSE_SECONDS = 0.1
"""Breakers probe after this, but for some rounds, which wait as long as they really do."""


@contextmanager
def small_round(tally: Tally, folder: Path) -> Iterator[None]:
    """One round in a folder of its own. Afterwards this process has the same open files and threads as before."""
    before = belongings()
    folder.mkdir(parents=True)
    yield
    left = left_behind(before)
    tally.leaks += len(left)
    tally.expect(not left, f"left behind: {', '.join(left)}")
    tally.iterations += 1
    shutil.rmtree(folder)


def settings(number: int, rng: random.Random) -> dict[str, object]:
    """The two layouts in turn, over either I/O engine, with any policy."""
    io_engine, policy = rng.choice(["auto", "threads"]), rng.choice(POLICIES)
    return {"layout": LAYOUTS[number % 2], "io_engine": io_engine, "policy": policy}


def judge_bytes(tally: Tally, engine: Engine, what: str) -> None:
    """No byte is wrong, whatever evicts."""
    tally.notes[f"rounds with {engine.policy}"] += 1
    tally.wrong_bytes += len(engine.wrong)
    tally.expect(not engine.wrong, f"{what}, policy {engine.policy}: {'; '.join(engine.wrong[:2])}")


def judge(tally: Tally, engine: Engine, bound: Bound, capacity: int = CAPACITY_BYTES) -> None:
    """What must hold under every fault of a disk."""
    judge_bytes(tally, engine, "a bad disk")
    tally.over_bound += bound.most_bytes > capacity
    tally.expect(bound.most_bytes <= capacity, f"{bound.most_bytes} bytes on the disk, {capacity} allowed")
    tally.notes["blocks loaded from disk"] += engine.lower.loaded
    tally.notes["blocks stored on disk"] += engine.lower.stored


# ---- full


def disk_full(budget: Budget) -> Tally:
    """Another process fills the disk, twice, and frees the space."""
    tally, rng = Tally(), random.Random(budget.seed)
    with Machine() as machine:
        for number in range(budget.count):
            folder = budget.folder / str(number)
            with small_round(tally, folder), ext4(machine, folder / "disk") as disk:
                _full_round(tally, disk, settings(number, rng), rng)
    return tally


def _full_round(tally: Tally, disk: Disk, chosen: dict[str, object], rng: random.Random) -> None:
    root = disk.mount / "root"
    engine = driven(root, seed=rng.randrange(1 << 30), **chosen)
    with engine, Bound(root) as bound:
        ballast = disk.fill()
        engine.run(requests=30)
        refused = engine.lower.dropped.get("disk_full", 0)
        tally.expect(refused > 0, f"{chosen}: nothing was dropped for lack of space: {engine.lower.dropped}")
        tally.notes["stores dropped, disk full"] += refused
        ballast.unlink()
        recovered(tally, engine, f"{chosen}: space returned to an empty store")
        engine.fill()
        ballast = disk.fill(leave_bytes=rng.choice([0, rng.randrange(2 * MIB)]))
        loaded = engine.lower.loaded
        engine.run(requests=60)
        tally.expect(engine.lower.loaded > loaded, f"{chosen}: a full disk was not read any more")
        ballast.unlink()
        recovered(tally, engine, f"{chosen}: space returned")
    judge(tally, engine, bound)


def recovered(tally: Tally, engine: Engine, what: str) -> None:
    """Once a fault is over, blocks must reach the disk and come back from it, and soon."""
    loaded, stored = engine.lower.loaded, engine.lower.stored

    def well() -> bool:
        lower = engine.lower
        return lower.loaded > loaded and lower.stored > stored and lower.breaker == "closed"

    seconds = engine.run_until(well, RECOVER_SECONDS)
    tally.expect(seconds is not None, f"{what}, and {RECOVER_SECONDS:g} s later it did not work: {engine.lower}")
    most = tally.notes["milliseconds until it worked again, at most"]
    tally.notes["milliseconds until it worked again, at most"] = max(most, int((seconds or 0) * 1000))


def no_inodes(budget: Budget) -> Tally:
    """Another process takes every inode, twice, and frees some and then all."""
    tally, rng = Tally(), random.Random(budget.seed)
    with Machine() as machine:
        for number in range(budget.count):
            folder = budget.folder / str(number)
            with small_round(tally, folder), ext4(machine, folder / "disk", mkfs=("-N", "32")) as disk:
                _inodes_round(tally, disk, settings(number, rng), rng)
    return tally


def _inodes_round(tally: Tally, disk: Disk, chosen: dict[str, object], rng: random.Random) -> None:
    root, capacity = disk.mount / "root", 2 * MIB
    engine = driven(root, seed=rng.randrange(1 << 30), sessions=6, rows=16, capacity=capacity, **chosen)
    with engine, Bound(root) as bound:
        taken = disk.take_inodes()
        engine.run(requests=20)
        refused = engine.lower.dropped.get("disk_full", 0)
        tally.expect(refused > 0, f"{chosen}: nothing was dropped for lack of inodes: {engine.lower.dropped}")
        tally.notes["stores dropped, no inodes"] += refused
        for path in taken[: rng.randrange(10, len(taken) + 1)]:
            path.unlink()
        recovered(tally, engine, f"{chosen}: inodes returned to an empty store")
        taken = disk.take_inodes()
        loaded = engine.lower.loaded
        engine.run(requests=60)
        tally.expect(engine.lower.loaded > loaded, f"{chosen}: without inodes nothing was read any more")
        for path in disk.mount.glob("taken-*"):
            path.unlink()
        recovered(tally, engine, f"{chosen}: inodes returned")
    judge(tally, engine, bound, capacity)


# ---- erring


def disk_errors(budget: Budget) -> Tally:
    """Reads, changes or both end with EIO for a while, on FUSE and below ext4: breakers open, probe and close."""
    tally, rng = Tally(), random.Random(budget.seed)
    with Machine() as machine:
        for number in range(budget.count):
            folder = budget.folder / str(number)
            mode = rng.choice([READS, WRITES, READS | WRITES])
            pause = None if number % 10 == 9 else SHORT_PAUSE_SECONDS
            with small_round(tally, folder):
                if number % 4 < 2:
                    with switched(machine, folder / "fuse") as shown:
                        _error_round(tally, shown.mount, shown.switch, mode, pause, settings(number, rng))
                else:
                    with ext4_behind_a_switch(machine, folder / "disk") as (disk, switch):
                        _error_round(tally, disk.mount, switch, mode, pause, settings(number, rng))
    return tally


def _error_round(
    tally: Tally, mount: Path, switch: Switch, mode: int, pause: float | None, chosen: dict[str, object]
) -> None:
    root, what, capacity = mount / "root", f"{chosen}, errors {mode}", 8 * MIB
    own = {"allow_network_fs": True} if chosen["layout"] == "slab" else {}
    engine = driven(root, sessions=20, capacity=capacity, **own, **chosen)
    with engine, Bound(root) as bound:
        engine.fill()
        recovered(tally, engine, f"{what}: before any error")
        struck = engine.breakers  # which one depends on what the layout reads before it writes
        for breaker in engine.breakers:
            breaker.pause_seconds = pause or breaker.pause_seconds
        failed = engine.lower.failed
        with switch.on(mode):
            opened = engine.run_until(lambda: any(breaker.opened for breaker in struck), 20.0)
            again = engine.run_until(lambda: any(breaker.opened > 1 for breaker in struck), 20.0)
        tally.expect(opened is not None, f"{what}: no breaker opened: {engine.lower}")
        tally.expect(again is not None, f"{what}: no breaker half-opened, failed and opened again: {engine.lower}")
        tally.notes["blocks that failed"] += engine.lower.failed - failed
        tally.notes["requests that failed in the disk"] += switch.counts.failed
        tally.notes["breakers opened"] += sum(breaker.opened for breaker in engine.breakers)
        recovered(tally, engine, f"{what}: the errors ended")
    judge(tally, engine, bound, capacity)


# ---- copy-on-write


def btrfs(budget: Budget) -> Tally:
    """Every block overwritten several times on btrfs, in two lives of the root."""
    return _overwritten(budget, "btrfs")


def xfs(budget: Budget) -> Tally:
    """The same on XFS with reflinks."""
    return _overwritten(budget, "xfs")


def _overwritten(budget: Budget, kind: str) -> Tally:
    tally, rng = Tally(), random.Random(budget.seed)
    with Machine() as machine:
        for number in range(budget.count):
            folder = budget.folder / str(number)
            with small_round(tally, folder), file_system(machine, kind, folder / "disk", 512) as disk:
                _overwritten_round(tally, disk, settings(number, rng), rng)
    return tally


def _overwritten_round(tally: Tally, disk: Disk, chosen: dict[str, object], rng: random.Random) -> None:
    """The bound is looked at from outside twice: what the root's files take, and what the file system has lost."""
    root, before = disk.mount / "root", disk.used_bytes
    for _ in range(2):
        engine = driven(root, sessions=60, seed=rng.randrange(1 << 30), **chosen)
        with engine, Bound(root) as bound:
            engine.fill()
            for _ in range(OVERWRITTEN_LOOKS):
                engine.run(requests=60)
                engine.drain(5.0)
                _look_at_statfs(tally, disk, before, root, chosen)
        _look_at_statfs(tally, disk, before, root, chosen)
        tally.expect(engine.lower.stored * PAGE_BYTES > 3 * CAPACITY_BYTES, f"{chosen}: too little was overwritten")
        judge(tally, engine, bound)


def _look_at_statfs(tally: Tally, disk: Disk, before: int, root: Path, chosen: dict[str, object]) -> None:
    taken = disk.used_bytes - before
    files = sum(path.is_file() for path in root.rglob("*")) if chosen["layout"] == "files" else 0
    allowed = CAPACITY_BYTES + files * METADATA_BYTES
    tally.over_bound += taken > allowed
    tally.expect(taken <= allowed, f"{chosen}: the file system lost {taken} bytes, {allowed} allowed")
    most, percent = f"percent of the capacity by statfs, {chosen['layout']}, at most", taken * 100 // CAPACITY_BYTES
    tally.notes[most] = max(tally.notes[most], percent)
    tally.notes["looks at statfs"] += 1


ATTACKS = (
    Attack(
        "disk full", "64 MiB ext4 on a loop device, filled by another process", 2, 20, disk_full, missing=without_loops
    ),
    Attack("no inodes", "ext4 with 32 inodes, all taken by another process", 2, 20, no_inodes, missing=without_loops),
    Attack("btrfs", f"{_OVERWRITTEN} btrfs", 2, 50, btrfs, missing=partial(without_loops, "btrfs")),
    Attack("XFS with reflinks", f"{_OVERWRITTEN} XFS", 2, 50, xfs, missing=partial(without_loops, "xfs")),
    Attack("disk errors", "EIO from FUSE, and from a device below ext4", 2, 50, disk_errors, missing=without_bad_disks),
)

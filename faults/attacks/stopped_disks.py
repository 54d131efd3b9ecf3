"""Disks that are slow, hang or freeze: the cost for the engine, a healthy neighbour, closing, and replays."""

from __future__ import annotations

import asyncio
import random
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from kvtier.types.jobs import JobKind

from ..attack import Attack, Budget, Tally
from ..driven import CAPACITY_BYTES, CLOSE_SECONDS, LOAD_SECONDS, Engine, Neighbours, driven, replay
from ..machine.child import Child, Line
from ..machine.fuse import HANGS, READS, WRITES, ext4_behind_a_switch, without_bad_disks
from ..machine.loops import Disk, ext4, frozen, throttled, without_loops, without_throttle
from ..machine.undo import Machine
from ..machine.watch import Bound, Heard
from .disks import RECOVER_SECONDS, SHORT_PAUSE_SECONDS, judge, recovered, settings, small_round

FELT_SECONDS = 0.005

# ---- slow, hung, frozen


@contextmanager
def slowed(
    machine: Machine, folder: Path, kind: str
) -> Iterator[tuple[Disk, Callable[[], AbstractContextManager[None]]]]:
    """A disk, and what makes it slow or stops it for a while: `frozen` (no write goes on), `hung` (nothing), `bps`,
    `iops` (4 MB, or 20 requests, a second)."""
    if kind == "hung":
        with ext4_behind_a_switch(machine, folder) as (disk, switch):
            yield disk, lambda: switch.on(HANGS)
        return
    with ext4(machine, folder) as disk:
        if kind == "frozen":
            yield disk, lambda: frozen(machine, disk)
        else:
            yield disk, lambda: throttled(machine, disk, kind, 4_000_000 if kind == "bps" else 20)


SLOW = ("frozen", "hung", "bps", "iops")


def without_slow_disks() -> str | None:
    """Why disks cannot be slowed down and stopped here, if so."""
    return without_throttle() or without_bad_disks()


def slow_disks(budget: Budget) -> Tally:
    """A process drives an engine; the disk stops or slows down, recovers, stops again, and is closed meanwhile."""
    tally, rng = Tally(), random.Random(budget.seed)
    with Machine() as machine:
        for number in range(budget.count):
            kind, folder = SLOW[number % 4], budget.folder / str(number)
            chosen = settings(number // 4 + number, rng) | {"seed": rng.randrange(1 << 30)}
            with small_round(tally, folder), slowed(machine, folder / "disk", kind) as (disk, fault):
                _slow_round(tally, disk, fault, kind, chosen)
    return tally


def _slow_round(
    tally: Tally, disk: Disk, fault: Callable[[], AbstractContextManager[None]], kind: str, chosen: dict[str, Any]
) -> None:
    idle = bool(chosen["seed"] % 3 == 0)
    what = f"{kind}, {chosen}, closed {'idle' if idle else 'at work'}"
    child = Child(lambda line: _drive_slow(line, disk.mount / "root", kind, idle, chosen))
    try:
        child.line.hear("filled")
        with fault():
            child.line.say("bad")
            child.line.hear("felt")
        child.line.say("good")
        child.line.hear("recovered", RECOVER_SECONDS + 30)
        with fault():
            child.line.say("bad")
            said = child.line.hear("closed")
        status = child.ended(20.0)
    except (TimeoutError, RuntimeError) as error:
        child.ended(0.0)
        tally.hangs += isinstance(error, TimeoutError)
        tally.expect(False, f"{what}: the driven process {error}")
        return
    tally.hangs += status is None
    tally.expect(status == 0, f"{what}: once all was well the process ended with {status}")
    for problem in said["problems"]:
        tally.expect(False, f"{what}: {problem}")
    tally.wrong_bytes += said["wrong"]
    tally.over_bound += said["over"]
    for name, value in said["notes"].items():
        tally.notes[name] = max(tally.notes[name], value) if "at most" in name else tally.notes[name] + value


def _drive_slow(line: Line, root: Path, kind: str, idle: bool, chosen: dict[str, Any]) -> None:
    """In a process of its own: what calls cost the engine, and what it gets, while its disk is bad and after."""
    found, engine = Tally(), driven(root, **chosen)
    with Heard() as heard, Bound(root) as bound:
        with engine:
            engine.fill()
            if chosen["seed"] % 5:
                for breaker in engine.breakers:
                    breaker.pause_seconds = SHORT_PAUSE_SECONDS
            engine.felt.seconds.clear()
            line.say("filled")
            line.hear("bad")
            drive = engine.run(seconds=4 * LOAD_SECONDS)
            for call in engine.felt.seconds:
                felt = engine.felt.p99_us(call)
                found.notes[f"microseconds 99 % of {call} calls took, at most"] = felt
                found.expect(felt < FELT_SECONDS * 1e6, f"99 % of {call} calls took {felt} us")
            late = drive.slowest_load_seconds
            found.expect(late < LOAD_SECONDS + 0.5, f"a load of {LOAD_SECONDS} s ended after {late:.1f} s")
            found.notes["blocks late, dropped or missed"] += engine.lower.late + sum(engine.lower.dropped.values())
            stopped = kind in ("frozen", "hung")
            found.expect(not stopped or engine.lower.late > 0, f"nothing was late: {engine.lower}")
            line.say("felt")
            line.hear("good")
            recovered(found, engine, "the disk works again")
            if idle:
                engine.drain(5.0)
            line.say("recovered")
            line.hear("bad")
            if not idle:
                engine.run(seconds=LOAD_SECONDS / 2)
        seconds = engine.close_seconds
    limit = 3 * CLOSE_SECONDS + 2.5
    found.expect(seconds < limit, f"close took {seconds:.1f} s with deadlines of {CLOSE_SECONDS} s")
    found.expect(idle or not stopped or heard.count("stuck") > 0, f"close said nothing of what is stuck: {heard.lines}")
    found.notes["milliseconds close took, at most"] = int(seconds * 1000)
    found.notes["closings that left stuck I/O behind"] = int(heard.count("stuck") > 0)
    judge(found, engine, bound)
    line.say("closed", wrong=found.wrong_bytes, over=found.over_bound, notes=found.notes, problems=found.problems)


# ---- a healthy root beside a frozen one

SHARE = 0.8
PAIRS = 5
WINDOW_SECONDS = 0.1
ATTEMPTS = 8
"""On a busy machine windows differ by more than half, so an attempt in three falls short although nothing is wrong. A
neighbour that is slowed down falls short in all attempts."""


def frozen_neighbour(budget: Budget) -> Tally:
    """Two roots of one tier, one of them frozen with I/O stuck in it: the other's throughput, with and without."""
    tally, rng = Tally(), random.Random(budget.seed)
    with Machine() as machine:
        for number in range(budget.count):
            folder, engine = budget.folder / str(number), rng.choice(["auto", "threads"])
            with small_round(tally, folder), ext4(machine, folder / "a") as bad, ext4(machine, folder / "b") as good:
                shares = []
                for attempt in range(ATTEMPTS):
                    roots = bad.mount / str(attempt), good.mount / str(attempt)
                    shares.append(asyncio.run(_beside(tally, roots, engine, lambda: frozen(machine, bad))))
                    if shares[-1] >= SHARE:
                        break
                    for root in roots:
                        shutil.rmtree(root)
                tally.expect(max(shares) >= SHARE, f"{engine}: beside a frozen root {shares} of the throughput")
                tally.notes["per cent of the throughput beside a frozen root, summed"] += int(max(shares) * 100)
    return tally


async def _beside(
    tally: Tally, roots: tuple[Path, Path], engine: str, fault: Callable[[], AbstractContextManager[None]]
) -> float:
    """The share of a healthy root's throughput that is left while its neighbour is frozen: of medians over windows
    that alternate, so that other load of this machine affects both alike."""
    from support_fs import layout, open_tier, options

    chosen = options(*roots, capacity=32 << 20, io_engine=engine, direct="auto")
    async with open_tier(chosen, layout(65536)) as tier:
        both = Neighbours(tier)
        for root in (0, 1):
            await both.blocks_a_second(root, WINDOW_SECONDS / 3)
        alone, beside = [], []
        for _ in range(PAIRS):
            alone.append(await both.blocks_a_second(1, WINDOW_SECONDS))
            with fault():
                stuck = asyncio.create_task(tier.backend.store(both.job(JobKind.STORE, 0)))
                beside.append(await both.blocks_a_second(1, WINDOW_SECONDS))
                tally.expect(not stuck.done(), "nothing was stuck in the frozen root")
            result = await stuck
            tally.expect(result.ok, f"what was stuck ended as {result.outcomes}")
        tally.wrong_bytes += both.wrong
    return statistics.median(beside) / statistics.median(alone)


def neighbour_in_a_stack(budget: Budget) -> Tally:
    """The same through a whole stack: what the healthy root's device moves for an engine, with and without."""
    tally, rng = Tally(), random.Random(budget.seed)
    with Machine() as machine:
        for number in range(budget.count):
            folder, seed = budget.folder / str(number), rng.randrange(1 << 30)
            with small_round(tally, folder), ext4(machine, folder / "a") as bad, ext4(machine, folder / "b") as good:
                shares = []
                for attempt in range(ATTEMPTS):
                    roots = bad.mount / str(attempt), good.mount / str(attempt)
                    shares.append(_beside_in_a_stack(tally, machine, (bad, good), roots, seed))
                    if shares[-1] >= SHARE:
                        break
                    for root in roots:
                        shutil.rmtree(root)
                tally.expect(max(shares) >= SHARE, f"beside a frozen root {shares} of what its device moved before")
                tally.notes["per cent of the device's traffic beside a frozen root, summed"] += int(max(shares) * 100)
    return tally


def _beside_in_a_stack(
    tally: Tally, machine: Machine, disks: tuple[Disk, Disk], roots: tuple[Path, Path], seed: int
) -> float:
    capacity = 2 * CAPACITY_BYTES
    engine = driven(*roots, rows=64, seed=seed, sessions=80, capacity=capacity, job_timeout_seconds=2 * LOAD_SECONDS)
    alone, beside = [], []
    with Bound(*roots) as bound, engine:
        engine.fill()
        for _ in range(3):
            alone.append(_traffic(engine, disks[1]))
            late = engine.lower.late
            with frozen(machine, disks[0]):
                noticed = engine.run_until(lambda late=late: engine.lower.late > late, RECOVER_SECONDS)
                tally.expect(noticed is not None, "nothing was late in the frozen root")
                beside.append(_traffic(engine, disks[1]))
            recovered(tally, engine, "the neighbour thawed")
    judge(tally, engine, bound, capacity)
    return statistics.median(beside) / statistics.median(alone)


def _traffic(engine: Engine, disk: Disk) -> float:
    """Bytes a second that a disk's device reads and writes while an engine is driven for a while."""
    before, begun = disk.moved_bytes, time.monotonic()
    engine.run(seconds=4 * WINDOW_SECONDS)
    return (disk.moved_bytes - before) / (time.monotonic() - begun)


# ---- replays

REPLAY_REQUESTS = 40
REPLAY_SECONDS = 90.0
REPLAYS = ("frozen", "erring", "full", "hung")


def replays(budget: Budget) -> Tally:
    """`kvtier replay` serves; half-way its disk fails and stays so. It must end, every byte right, with misses."""
    import kvtier.tools.replay.run  # noqa: F401 - brings torch: once, for all children

    tally, rng = Tally(), random.Random(budget.seed)
    with Machine() as machine:
        for number in range(budget.count):
            kind, folder = REPLAYS[number % len(REPLAYS)], budget.folder / str(number)
            chosen = settings(number // len(REPLAYS) + number, rng)
            with small_round(tally, folder), bad_disk(machine, folder / "disk", kind) as (disk, fault):
                _replay_round(tally, disk, fault, kind, chosen | {"seed": rng.randrange(1 << 30)})
    return tally


@contextmanager
def bad_disk(
    machine: Machine, folder: Path, kind: str
) -> Iterator[tuple[Disk, Callable[[], AbstractContextManager[None]]]]:
    """As `slowed`, and a disk that is `full` or `erring` for a while."""
    if kind == "erring":
        with ext4_behind_a_switch(machine, folder) as (disk, switch):
            yield disk, lambda: switch.on(READS | WRITES)
    elif kind == "full":
        with ext4(machine, folder) as disk:
            yield disk, lambda: filled(disk)
    else:
        with slowed(machine, folder, kind) as both:
            yield both


@contextmanager
def filled(disk: Disk) -> Iterator[None]:
    """Another process has every byte of a disk for a while."""
    ballast = disk.fill()
    try:
        yield
    finally:
        ballast.unlink()


def _replay_round(
    tally: Tally, disk: Disk, fault: Callable[[], AbstractContextManager[None]], kind: str, chosen: dict[str, Any]
) -> None:
    what = f"replay, {kind}, {chosen}"
    child = Child(lambda line: replay(line, disk.mount / "root", REPLAY_REQUESTS, chosen))
    try:
        child.line.hear("half-way")
        with fault():
            child.line.say("bad")
            said = child.line.hear("served", REPLAY_SECONDS)
        status = child.ended(20.0)
    except (TimeoutError, RuntimeError) as error:
        child.ended(0.0)
        tally.hangs += isinstance(error, TimeoutError)
        tally.expect(False, f"{what}: {error}")
        return
    tally.hangs += status is None
    tally.expect(status == 0, f"{what}: ended with {status}")
    tally.wrong_bytes += said["mismatched"]
    tally.expect(said["requests"] == REPLAY_REQUESTS, f"{what}: {said}")
    # A full disk costs nothing where blocks are evicted for new ones.
    tally.expect(said["missed"] > 0 or kind == "full", f"{what}: the bad disk cost nothing: {said}")
    tally.notes[f"rounds with {chosen['policy']}"] += 1
    tally.notes["blocks verified"] += said["verified"]
    tally.notes["blocks missed, dropped or late"] += said["missed"]


ATTACKS = (
    Attack("slow disk", "fsfreeze, a hung device, blkio.throttle", 2, 100, slow_disks, missing=without_slow_disks),
    Attack("frozen neighbour", "fsfreeze of one of two roots", 1, 20, frozen_neighbour, missing=without_loops),
    Attack(
        "frozen neighbour in a stack",
        "fsfreeze of one of two roots of a tier",
        1,
        20,
        neighbour_in_a_stack,
        missing=without_loops,
    ),
    Attack("replay on a bad disk", "frozen, erring, full, hung", 2, 40, replays, missing=without_slow_disks),
)

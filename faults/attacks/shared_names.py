"""Names that other users made in shared memory, in the hope that an engine looks at each of them."""

from __future__ import annotations

import mmap
import os
import signal
import time
from functools import partial
from pathlib import Path

from kvtier.types.geometry import Geometry, GroupLayout, KVLayout, TensorRef
from kvtier_cpu import RegionSpec, Sharing, open_region
from kvtier_cpu.region.opening import RegionHost, Step

from ..attack import Attack, Budget, Tally
from ..machine.child import Child, Line
from ..machine.loops import mounted
from ..machine.undo import Machine, without_root

SHARED = Path("/dev/shm")
NAMES = 100_000
OWN_USER, OTHER_USER = 23_456, 12_345
OPEN_SECONDS = 0.25
"""Processor time of an opening. The listing takes 0.04 to 0.1; opening each name took 0.65 and more."""


def names_of_others(budget: Budget) -> Tally:
    """100,000 names of another user, some of them like ours; a region opens, and what a dead engine left goes."""
    prefixes = ("kvtier-", f"kvtier-{OTHER_USER}-", f"kvtier-{OWN_USER}-")
    tally = Tally()
    with Machine():
        for number in range(budget.count):
            with mounted("tmpfs", "tmpfs", SHARED, "size=16m"):
                prefix = prefixes[(budget.seed + number) % len(prefixes)]
                _round(tally, prefix, number)
            tally.iterations += 1
    return tally


def _round(tally: Tally, prefix: str, number: int) -> None:
    seed = SHARED / "seed"
    seed.touch(0o600)
    os.chown(seed, OTHER_USER, OTHER_USER)
    for name in range(NAMES):
        os.link(seed, SHARED / f"{prefix}{name:032x}.control")
    dead = Child(partial(_die, number))
    tally.expect(dead.ended(60.0) == -signal.SIGKILL, "a process that was to die while it opened a region did not")
    left = len(os.listdir(SHARED)) - NAMES - 1
    tally.expect(left == 2, f"a dead process left {left} names where 2 were expected")
    child = Child(partial(_open, number))
    try:
        seconds = child.line.hear("open", 60.0)["seconds"]
        tally.hangs += seconds > OPEN_SECONDS
        tally.expect(seconds <= OPEN_SECONDS, f"{prefix}: an opening took {seconds:.2f} s of processor time")
        most = tally.notes["milliseconds of processor time of an opening, at most"]
        tally.notes["milliseconds of processor time of an opening, at most"] = max(most, int(seconds * 1000))
    except (TimeoutError, RuntimeError) as error:
        tally.hangs += 1
        tally.expect(False, f"{prefix}: {error}")
    tally.expect(child.ended(20.0) == 0, f"{prefix}: the process did not end in order")
    left = len(os.listdir(SHARED)) - NAMES - 1
    tally.leaks += left
    tally.expect(left == 0, f"{prefix}: {left} names of a dead engine were not swept, or names of others went")
    tally.notes["names of others"] += NAMES


def _spec(engine_id: str) -> RegionSpec:
    geometry = Geometry(KVLayout((GroupLayout((TensorRef(0, mmap.PAGESIZE),)),)), mmap.PAGESIZE)
    return RegionSpec(geometry, 16, b"n" * 16, (0,), Sharing.NAMED, engine_id, participants=2)


def _die(number: int, line: Line) -> None:
    os.setuid(OWN_USER)

    def observe(step: Step) -> None:
        if step is Step.LINKED:
            os.kill(os.getpid(), signal.SIGKILL)

    open_region(_spec(f"dead {number}"), RegionHost(observe=observe))


def _open(number: int, line: Line) -> None:
    os.setuid(OWN_USER)
    begun = time.process_time()
    region = open_region(_spec(f"alive {number}"))
    line.say("open", seconds=time.process_time() - begun)
    region.close()


ATTACKS = (
    Attack(
        "names of others in shared memory",
        "100,000 names of another user in /dev/shm, some like ours, and what a dead engine left among them: an opening "
        "takes at most 0.25 s of processor time",
        3, 30, names_of_others, missing=without_root,
    ),
)  # fmt: skip

"""kill -9, on real files: during everything, at every step of a reset, over a stale snapshot, before late writes."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from ..attack import Attack, Budget, Tally
from ..suite import PROJECT

_MEMORY = Path("/dev/shm")
_ENOUGH_TO_JUDGE, _ENOUGH_TO_TEAR, _ENOUGH_FOR_ALL = 40, 200, 1000
_ENOUGH_FOR_TWO = 100
_LATE_ON_FILES = 5
_LEAN = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


def lean(budget: Budget, *parts: tuple[str, int]) -> Tally:
    """Run rows of the kill harness side by side, each in a process that has imported nothing but what victims need."""
    running = []
    seeds = random.Random(budget.seed)
    tally = Tally()
    for number, (row, count) in enumerate(parts):
        if count:
            folder = budget.folder / str(number)
            folder.mkdir(mode=0o700)
            command = [sys.executable, "-m", "faults.kill", row, str(count), str(seeds.getrandbits(32)), str(folder)]
            running.append(
                subprocess.Popen(command, cwd=PROJECT, env=os.environ | _LEAN, stdout=subprocess.PIPE,
                                 stderr=subprocess.PIPE, text=True)
            )  # fmt: skip
    for process in running:
        output, complaint = process.communicate()
        if process.returncode:
            tally.expect(False, f"the harness died with status {process.returncode}: {complaint[-2000:]}")
        else:
            tally.add(Tally.from_json(json.loads(output)))
    return tally


def _halves(row: str, budget: Budget) -> tuple[tuple[str, int], ...]:
    """Two processes for a hundred iterations and more; a long run has shards instead."""
    if budget.long or budget.count < _ENOUGH_FOR_TWO:
        return ((row, budget.count),)
    return (row, budget.count // 2), (row, budget.count - budget.count // 2)


def kill(layout: str, budget: Budget) -> Tally:
    """Open, load everything, store, evict, format regions anew, reset, close; be killed at a random moment; repeat."""
    tally = lean(budget, *_halves(f"kill {layout}", budget))
    notes, kills = tally.notes, tally.iterations
    if kills >= _ENOUGH_TO_JUDGE:
        caught, hit = notes["kills with I/O in flight"], notes["cycles with late writes"]
        tally.expect(2 * caught >= kills, f"only {caught} of {kills} kills caught I/O in flight")
        tally.expect(10 * hit >= kills, f"only {hit} of {kills} lives were hit by late writes into places used again")
        tally.expect(4 * notes["torn slots"] >= kills, "hardly any slot was torn")
        tally.expect(notes["blocks evicted"] >= kills, "hardly any block was evicted")
        tally.expect(notes["resets acknowledged"] > 0 or kills < _ENOUGH_FOR_ALL, "no reset was acknowledged")
        refused = notes["blocks refused after opening"]
        tally.expect(refused > 0 or kills < _ENOUGH_TO_TEAR, "no torn block was there to be refused")
        compared = notes["blocks loaded after opening and compared"]
        tally.expect(compared >= 5 * kills, f"only {compared} blocks came back in {kills} cycles")
        if layout == "slab":
            tally.expect(20 * notes["regions formatted again"] >= kills, "hardly any region was formatted again")
            snapshots = notes["opened from a snapshot"]
            tally.expect(snapshots > 0 or kills < _ENOUGH_FOR_ALL, "no life began from a snapshot")
            tally.expect(notes["blocks expected back"] >= 5 * kills, "hardly anything was expected back")
            lost = notes["expected blocks that were lost"]
            tally.expect(not lost, f"{lost} blocks were acknowledged, left alone and lost")
        else:
            tally.expect(notes["temporaries and leases left by the dead"] >= kills, "the dead left hardly anything")
    return tally


def late(budget: Budget) -> Tally:
    """Every death is followed by late writes into the next life; mostly on layout `slab`, which reuses places."""
    on_files = budget.count // _LATE_ON_FILES
    tally = lean(budget, ("late slab", budget.count - on_files), ("late files", on_files))
    tally.expect(tally.notes["late writes into places used again"] >= tally.iterations, "few places were used again")
    if tally.iterations >= _ENOUGH_TO_JUDGE:
        tally.expect(tally.notes["misses of living victims"] > 0, "no late write was met by a load")
    return tally


def stale(budget: Budget) -> Tally:
    """Close in order, open, write, be killed, open: never by the old snapshot."""
    tally = lean(budget, *_halves("stale", budget))
    tally.expect(
        tally.notes["opened from a snapshot"] >= tally.iterations, "the snapshots were not used in the first place"
    )
    tally.expect(tally.notes["snapshots that came back"] > 0, "no snapshot came back")
    tally.expect(
        tally.notes["blocks loaded after opening and compared"] > 10 * tally.iterations, "hardly anything stayed"
    )
    return tally


def reset(budget: Budget) -> Tally:
    """Reset and store, once for each I/O call of it, and be killed at that call. The seed draws the first half."""
    first = budget.seed % 2
    tally = lean(budget, (f"reset {first}", (budget.count + 1) // 2), (f"reset {1 - first}", budget.count // 2))
    for name in ("steps on slab, 1 root(s)", "steps on slab, 2 root(s)", "steps on files, 1 root(s)"):
        tally.expect(tally.notes[name] >= 5 * budget.count, f"hardly any {name}")
    tally.expect(tally.notes["killed before the reset was acknowledged"] > 0, "no reset was interrupted")
    tally.expect(tally.notes["blocks hit after a reset, all of them newer"] > 0, "nothing was hit after a reset")
    return tally


def power(budget: Budget) -> Tally:
    """Record a session with a reset, and open every image that a power loss at each of its moments may leave."""
    from ..kill.power import PowerLoss

    tally = Tally()
    home = tempfile.mkdtemp(prefix="kvtier-fault-power-", dir=_MEMORY if os.access(_MEMORY, os.W_OK) else budget.folder)
    try:
        PowerLoss(Path(home), budget.seed, tally).run(budget.count)
    finally:
        shutil.rmtree(home, ignore_errors=True)
    tally.expect(tally.notes["blocks compared"] > 0 and tally.notes["blocks refused"] > 0, "the images held nothing")
    tally.expect(tally.notes["blocks from before a reset that did not hold"] > 0, "no reset was undone")
    return tally


def _row(name: str, how: str, counts: tuple[int, int], attack: Callable[[Budget], Tally], shards: int = 1,
         missing: Callable[[], str | None] = lambda: None) -> Attack:  # fmt: skip
    return Attack(name, how, *counts, attack, missing=missing, shards=shards)


ATTACKS = (
    _row(
        "kill -9 slab",
        "SIGKILL at a random moment after the first I/O of opening, loading, storing, resetting or closing; sectors of "
        "what was in flight put back; in a tenth of the cycles old writes land in the next life; every byte compared",
        (250, 50_000),
        partial(kill, "slab"),
        shards=8,
    ),
    _row("kill -9 files", "the same on layout files", (250, 50_000), partial(kill, "files"), shards=8),
    _row(
        "reset, then crash",
        "SIGKILL at each I/O call of a reset and of the first stores after it, also half-way through a write; one root "
        "and two, closed in order before or not, both layouts; an iteration is such a call, the count how often "
        "half of these",
        (2, 80),
        reset,
        shards=8,
    ),
    _row(
        "reset, then power loss",
        "every write of a session with a reset recorded; at each moment subsets of the unflushed sectors and names are "
        "lost; an iteration is an image that is opened, the count how many sessions",
        (1, 200),
        power,
        shards=8,
    ),
    _row(
        "stale snapshot",
        "close in order, open, write, SIGKILL, half the time the old snapshot put back, open: found by scanning",
        (10, 50),
        stale,
    ),
    _row(
        "late writes",
        "after each SIGKILL what was in flight lands during the next life, once it has used those places again",
        (50, 10_000),
        late,
        shards=8,
    ),
)

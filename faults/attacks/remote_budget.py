"""The write budget of object stores: what is in the bucket, seen from outside, against what a process may write."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from contextlib import suppress
from typing import Any

from kvtier.cli.temporary_folders import temporary_folder

from ..attack import Attack, Budget, Tally
from ..remote.objects import ROUND_SHARES, SHARES_IN_A_DAY, bucket, with_ceph, without_ceph
from .remote import held_within_bounds, leaving_nothing, scene_of

SPENT_BYTES = 8 << 20
"""A share that an engine at work uses up at once: it has 20 MiB of blocks."""
DAY_SECONDS = 60.0
LIFE_SECONDS = 150.0
A_DAY_BYTES = SHARES_IN_A_DAY * (4 << 20)
REQUEST_SECONDS = 2.0
"""An object is there at the latest so long after its bytes were taken from the budget."""
LEAST_SHARE = 0.5
"""So much of what may be written is written, or the attack shows nothing."""
OPEN_SECONDS = 60.0


def budgets(ceph: Any, budget: Budget) -> Tally:
    """An engine whose budget is spent; then days in a minute each, of processes that are killed and started again."""
    tally, rng = Tally(), random.Random(budget.seed)
    for _ in range(budget.count):
        with bucket(ceph, SPENT_BYTES // ROUND_SHARES) as server, leaving_nothing(tally, "a budget that is spent"):
            spent(tally, server, rng.randrange(1 << 30))
        with bucket(ceph, 0) as server:
            days(tally, server, rng)
            server.empty()  # the cluster has room for sixteen rounds
    tally.iterations = budget.count
    return tally


def spent(tally: Tally, server: Any, seed: int) -> None:
    """What is beyond the budget is dropped, loads go on, and no more is in the bucket."""
    what = "a budget that is spent"
    with scene_of(tally, server, seed, what) as scene:
        engine = scene.engine
        engine.run(requests=60)
        dropped = engine.lower.dropped.get("write_budget", 0)
        tally.expect(dropped > 0, f"{what}: nothing was dropped: {engine.lower.dropped}")
        tally.expect(engine.lower.loaded > 0, f"{what}: nothing was loaded")
        tally.expect(held_within_bounds(tally, server, what) > SPENT_BYTES // 2, f"{what}: little was stored")
        tally.notes["stores dropped, budget spent"] += dropped


def days(tally: Tally, server: Any, rng: random.Random) -> None:
    """The sizes of all objects that came within a day are no more than a process may write in one."""
    begun, first, deaths = time.monotonic(), 0, 0
    with temporary_folder("kvtier-budget-") as state:
        options = server.bucket.options(
            write_bytes_per_day=A_DAY_BYTES, state_folder=f"{state}/kept", request_timeout_seconds=REQUEST_SECONDS
        )
        while time.monotonic() - begun < LIFE_SECONDS:
            life(tally, options, first, rng.uniform(1.0, 20.0))
            first, deaths = first + (1 << 20), deaths + 1
    lived = time.monotonic() - begun
    tally.notes["processes killed"] += deaths
    judge(tally, _arrived(server), lived)


def life(tally: Tally, options: Any, first: int, seconds: float) -> None:
    """A process writes for some time, and is killed."""
    text = options.model_dump_json(exclude_unset=True)
    command = [sys.executable, "-m", "faults.remote.writer", text, str(DAY_SECONDS), str(first)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        killer = time.monotonic() + OPEN_SECONDS
        tally.expect(process.stdout.readline() == b"open\n", "a process did not open its tier")
        tally.expect(time.monotonic() < killer, "opening took a minute")
        with suppress(subprocess.TimeoutExpired):
            tally.expect(process.wait(seconds) is None, "a process ended by itself")
        process.kill()


def _arrived(server: Any) -> list[tuple[float, int]]:
    """When each object came, and its size."""
    import obstore

    listed = (one for some in obstore.list(server.store, "kvtier/b/") for one in some)
    return sorted((one["last_modified"].timestamp(), one["size"]) for one in listed)


def judge(tally: Tally, arrived: list[tuple[float, int]], lived_seconds: float) -> None:
    """Every window of a day, less the time that an object may take to come."""
    window, oldest, held, most = DAY_SECONDS - REQUEST_SECONDS, 0, 0, 0
    for at, size in arrived:
        held += size
        while arrived[oldest][0] <= at - window:
            held -= arrived[oldest][1]
            oldest += 1
        most = max(most, held)
    total, may = sum(size for _, size in arrived), A_DAY_BYTES * lived_seconds / DAY_SECONDS
    tally.over_bound += most > A_DAY_BYTES
    tally.expect(most <= A_DAY_BYTES, f"{most} bytes in a day, {A_DAY_BYTES} allowed")
    tally.expect(total > LEAST_SHARE * may, f"only {total} bytes were written of {may:.0f}")
    tally.notes["looks at the bound"] += 1
    tally.notes["per mille of a day's bytes in the fullest day, at most"] = 1000 * most // A_DAY_BYTES
    tally.notes["MiB written"] += total >> 20


ATTACKS = (
    Attack(
        "write budget of s3",
        "over Ceph: an engine whose budget is spent; then days of a minute each in which processes with one state "
        "folder write what they may, are killed and started again: sizes and times of all objects, from outside",
        1, 20, with_ceph(budgets), minutes=8, missing=without_ceph,
    ),
)  # fmt: skip

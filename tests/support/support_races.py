"""Processes that race for one shared region and are killed on the way, and files in its place that are not it."""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import support_region_peer
from support_region import Peer, named

from kvtier.errors import RegionError
from kvtier_cpu import open_region
from tests.tiers.cpu import test_region, test_region_race
from tests.tiers.cpu.test_region import HOSTILE, STALE
from tests.tiers.cpu.test_region_race import CREATOR_STEPS, chaos, race

CROWD = 8
CHAOS_SHARE = 0.25
IDENTITY_BYTES = 88


class ForkedPeer(Peer):
    """A peer forked from this process, which has no threads: it costs no start of an interpreter."""

    started = 0

    def __init__(self) -> None:
        down, up = os.pipe(), os.pipe()
        sys.stdout.flush()
        pid = os.fork()
        if not pid:
            os.dup2(down[0], 0)
            os.dup2(up[1], 1)
            os.closerange(3, 1024)
            self._live()
        os.close(down[0])
        os.close(up[1])
        ForkedPeer.started += 1
        self.process: Any = SimpleNamespace(
            pid=pid,
            stdin=os.fdopen(down[1], "wb"),
            stdout=os.fdopen(up[0], "rb"),
            kill=lambda: os.kill(pid, signal.SIGKILL),
            wait=lambda: os.waitpid(pid, 0),
        )

    @staticmethod
    def _live() -> None:
        status = 70
        try:
            sys.stdin, sys.stdout = os.fdopen(0), os.fdopen(1, "w")
            support_region_peer.serve()
            status = 0
        finally:
            os._exit(status)


@contextmanager
def shared_folder() -> Iterator[Path]:
    """An empty folder in shared memory, for this process alone."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="kvtier-attack-") as place:
        yield Path(place)


def create_race(budget: Any, tally: Any) -> Any:
    """Rounds of eight processes that open one region at once; in a quarter of them one is killed at some step."""
    rng = random.Random(budget.seed)
    ForkedPeer.started = 0
    with pytest.MonkeyPatch.context() as monkeypatch, shared_folder() as shm:
        monkeypatch.setattr(test_region_race, "Peer", ForkedPeer)
        crowd: list[Peer] = [ForkedPeer() for _ in range(CROWD)]
        try:
            for number in range(budget.count):
                killing = rng.random() < CHAOS_SHARE or not number
                if killing:
                    chaos(shm, crowd, rng)
                else:
                    race(crowd, shm, rng)
                tally.iterations += 1
                tally.notes["rounds with a kill ordered"] += killing
        except AssertionError as broken:
            tally.expect(False, f"round {number}: {broken!r}")
        finally:
            for peer in crowd:
                peer.kill()
        tally.leaks += len(os.listdir(shm))
    tally.notes["processes killed on the way"] = ForkedPeer.started - CROWD
    tally.expect(
        budget.count < 20 or tally.notes["processes killed on the way"] > 0, "no process was killed on the way"
    )
    return tally


# -- files that are not the region ------------------------------------------------------------------------------


def damaged_live_header(shm: Path, rng: random.Random) -> None:
    """Random bytes of a live region's identity are others: refused; put right again: joined."""
    owner = open_region(named(shm, "e", 2, 0))
    control = next(shm.glob("*.control"))
    good = control.read_bytes()[:IDENTITY_BYTES]
    bad = bytearray(good)
    for at in rng.sample(range(IDENTITY_BYTES), rng.randint(1, 8)):
        bad[at] ^= rng.randint(1, 255)
    with control.open("r+b", buffering=0) as file:
        file.write(bad)
        with pytest.raises(RegionError):
            open_region(named(shm, "e", 2, 1, deadline_seconds=5))
        file.seek(0)
        file.write(good)
    joined = open_region(named(shm, "e", 2, 1))
    assert joined.incarnation == owner.incarnation
    joined.close()
    owner.close()


def random_leftover(shm: Path, rng: random.Random) -> None:
    """Random bytes without a lock on them: swept, and a new region made of zeros."""
    content = rng.randbytes(rng.choice((1, 7, 88, 4096, 100_000)))
    if rng.random() < 0.5:
        content = b"kvtierR\0" + content
    test_region.test_a_leftover_without_a_live_lock_is_swept_whatever_it_holds(shm, content)


def everyone_killed(shm: Path, rng: random.Random, step: str = "") -> None:
    """A creator and a joiner are killed with SIGKILL; the next start of anything sweeps what they left."""
    peers: list[Peer] = [ForkedPeer(), ForkedPeer()]
    spec = {"directory": str(shm), "engine_id": "e", "participants": 3}
    try:
        said = peers[0].call("open", spec=spec | {"participant": 0}, die_at=step)
        assert (said is None) == bool(step), said
        if not step:
            assert peers[1].call("open", spec=spec | {"participant": 1}) is not None
            assert len(os.listdir(shm)) == 2, "the third has not mapped yet"
    finally:
        for peer in peers:
            peer.kill()
    open_region(named(shm, "another", 1)).close()
    assert os.listdir(shm) == []


def plain(test: Callable[..., None], **values: Any) -> Callable[[Path, random.Random], None]:
    return lambda shm, rng: test(shm, **values)


CASES: dict[str, Callable[[Path, random.Random], None]] = {
    **{
        f"{name} for the control file": plain(test_region.test_what_is_foreign_is_neither_used_nor_removed, plant=plant)
        for name, plant in HOSTILE.items()
    },
    **{
        f"{name} for the rows": plain(
            test_region.test_something_foreign_in_the_rows_place_is_a_typed_error_that_leaves_no_claim,
            plant=HOSTILE[name],
        )
        for name in ("symlink", "fifo", "directory")
    },
    **{
        f"leftover: {name}": plain(
            test_region.test_a_leftover_without_a_live_lock_is_swept_whatever_it_holds, content=content
        )
        for name, content in STALE.items()
    },
    **{f"everyone killed, {step}": partial(everyone_killed, step=step) for step in CREATOR_STEPS},
    "everyone killed once mapped": everyone_killed,
    **{
        f"live, but {next(iter(other))} differs": plain(
            test_region.test_a_live_region_of_another_geometry_is_refused_and_left_alone, other=other
        )
        for other in ({"num_rows": 17}, {"namespace_digest": b"m" * 16})
    },
    "each word of a live header": plain(test_region.test_a_live_region_whose_header_is_wrong_is_refused),
    "a perfect copy without its lock": plain(
        test_region.test_a_perfect_copy_of_a_region_without_its_lock_is_not_adopted
    ),
    "rows swapped": plain(test_region.test_rows_swapped_for_another_file_are_not_mapped),
    "the same participant twice": plain(test_region.test_the_same_participant_cannot_map_twice),
    "a late sweeper": plain(test_region.test_a_late_sweeper_does_not_take_a_successors_name_away),
    "a live region swept": plain(test_region.test_no_process_sweeps_a_live_region),
    "random damage of a live header": damaged_live_header,
    "random leftover": random_leftover,
}
if os.geteuid() == 0:
    CASES["another user's"] = plain(test_region.test_a_file_of_another_user_is_refused)


def hostile_region(budget: Any, tally: Any) -> Any:
    """Every case once, then the random ones and others by chance."""
    rng = random.Random(budget.seed)
    names = list(CASES)
    chosen = [
        *names,
        *rng.choices([*names, *["random damage of a live header", "random leftover"] * 8], k=budget.count),
    ]
    for name in chosen[: budget.count]:
        with shared_folder() as shm:
            try:
                CASES[name](shm, rng)
            except (AssertionError, pytest.fail.Exception) as broken:
                tally.expect(False, f"{name}: {broken!r}")
        tally.iterations += 1
    tally.notes["kinds of file"] = len({*chosen[: budget.count]})
    return tally

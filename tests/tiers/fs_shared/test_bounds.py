"""Layout files: two processes on one root, evicting at once, then killed. The bound of the docs, seen from outside."""

from __future__ import annotations

import os
import random
import time
from contextlib import ExitStack, nullcontext
from pathlib import Path

import pytest
from support_files import (
    account_errors,
    account_is_true,
    block_files,
    bucket_locked,
    disk_bytes,
    open_files,
    options,
    temporaries,
)
from support_files_mount import small_disk, used_bytes
from support_files_peer import PROGRESS, SHARED_CAPACITY, SHARED_DEPTH, SHARED_POOL, ForkServer
from support_fs import keys

from kvtier.types.jobs import LOADED, MISSING

FILE_BYTES = 4096 + 16384
PROCESSES = 2
HANG_SECONDS = 600


class Bound:
    """Samples of what a root takes. `disk` is the file system it has for itself, None where it shares one.

    What the folders show stays within the capacity, stores in flight included. What the file system counts may exceed
    that by the blocks that were evicted while they are read: in each process `io_depth` of them at most.
    """

    def __init__(self, root: Path, disk: Path | None) -> None:
        self.root, self.disk = root, disk
        self.base = used_bytes(disk) if disk else 0
        self.samples = self.highest = 0

    def sample(self) -> None:
        """Look once, and check."""
        self.samples += 1
        if self.disk is not None:
            used = used_bytes(self.disk) - self.base
            most = SHARED_CAPACITY + PROCESSES * SHARED_DEPTH * FILE_BYTES
            assert used <= most, f"the file system counts {used - SHARED_CAPACITY} bytes over the capacity"
            self.highest = max(self.highest, used)
        if self.samples % 32 == 0:
            errors = account_errors(self.root)
            assert not any(errors.values()), f"the accounts of live processes are exact, but {errors}"
            self.look_into_the_folders()

    def look_into_the_folders(self) -> None:
        """Each bucket while nobody changes it, so that nothing is counted that came for something that went."""
        held = 0
        for folder in sorted(self.root.glob("bucket-*")):
            with bucket_locked(folder):
                held += disk_bytes(folder)
        assert held <= SHARED_CAPACITY, f"{held - SHARED_CAPACITY} bytes over the bound"
        self.highest = max(self.highest, held)


def progress(path: Path) -> tuple[int, int, int]:
    """Rounds, blocks loaded and blocks evicted by a process, as far as it noted them."""
    data = path.read_bytes() if path.exists() else b""
    return PROGRESS.unpack(data) if len(data) == PROGRESS.size else (0, 0, 0)


async def check_after_the_end(root: Path, everything: list[bytes]) -> None:
    """Both are gone. One sweep, then nothing of them is left, and accounts are exact from each bucket's next store."""
    async with open_files(options(root, capacity=SHARED_CAPACITY), rows=32) as tier:
        await tier.backend.sweep()
        assert temporaries(root) == []
        assert os.listdir(root / "leases") == [tier.backend._root.lease]
        there = [key for key in everything if tier.path(key).exists()]
        assert len(there) == len(block_files(root)), "nothing but blocks that can be looked up"
        assert await tier.load(there) == [LOADED] * len(there)
        assert await tier.load(keys(5, start=9000)) == [MISSING] * 5
        await tier.store(keys(64, start=5000))
        assert account_is_true(tier)
        assert disk_bytes(root) <= SHARED_CAPACITY


@pytest.mark.parametrize("place", ["a disk of its own", "a folder"])
@pytest.mark.parametrize("lives", [2, pytest.param(500, marks=pytest.mark.long)])
async def test_two_processes_that_evict_and_are_killed_stay_within_the_bound(tmp_path, seed, place, lives, dial):
    lives = min(lives, dial(lives, 1))
    rng, everything = random.Random(seed), keys(SHARED_POOL + 16) + keys(64, start=5000)
    with small_disk(16 << 20) if place == "a disk of its own" else nullcontext() as disk:
        root = (disk or tmp_path) / "root"
        root.mkdir(mode=0o700)
        bound, rounds, loaded, evicted, caught = Bound(root, disk), 0, 0, [0, 0], 0
        with ExitStack() as stack:
            servers = [stack.enter_context(ForkServer(root)) for _ in range(PROCESSES)]
            for life in range(lives):
                notes = [tmp_path / f"progress-{life}-{number}" for number in range(PROCESSES)]
                pids = [
                    server.start(f"{rng.randrange(2**32)} {note}") for server, note in zip(servers, notes, strict=True)
                ]
                least, until = rng.randint(20, 60), time.monotonic() + HANG_SECONDS
                while min(progress(note)[0] for note in notes) < least:
                    bound.sample()
                    assert all(server.alive() for server in servers), "a process ended by itself"
                    assert time.monotonic() < until, "a process stands still"
                for server, pid in zip(servers, pids, strict=True):
                    server.kill(pid)
                bound.look_into_the_folders()  # accounts are exact again from the next store on
                caught += bool(temporaries(root))
                for number, note in enumerate(notes):
                    rounds, loaded = rounds + progress(note)[0], loaded + progress(note)[1]
                    evicted[number] += progress(note)[2]
                    note.unlink()
                await check_after_the_end(root, everything)
        assert min(evicted) > 20 * lives, "both evicted"
        assert loaded > 20 * lives
        assert bound.samples > 20 * lives
        assert bound.highest > 0.8 * SHARED_CAPACITY, "the root was nearly full"
        assert caught or lives < 50, "no kill caught a store in flight"

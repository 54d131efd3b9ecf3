"""Layout files: something else lies where a small file or a folder belongs. Misses and drops, never a hang."""

from __future__ import annotations

import asyncio
import os
import shutil
from contextlib import nullcontext
from itertools import product
from pathlib import Path

import pytest
from support_files import account_is_true, block_files, open_files, options, temporaries
from support_fs import keys

from kvtier.errors import RootError
from kvtier.testing.trace import leaving_no_trace
from kvtier.types.jobs import LOADED, STORED, BlockStatus

LEASE = "a" * 16
HANG_SECONDS = 60


def replace_with(path: Path, kind: str) -> None:
    """Put something that is no plain file, or nothing, in a place."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    if kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a folder":
        path.mkdir()
    elif kind == "a link to a device":
        path.symlink_to("/dev/zero")
    elif kind == "a link to nowhere":
        path.symlink_to(path.parent / "nowhere")
    elif kind == "a file":
        path.write_bytes(b"x")


KINDS = ["a pipe", "a folder", "a link to a device", "a link to nowhere"]
LOADS_GO_ON = ["bucket-00/account", "bucket-00/lock", f"leases/{LEASE}", f"bucket-00/new-{LEASE}-1", f"new-{LEASE}-1"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", LOADS_GO_ON)
async def test_something_else_in_a_small_files_place_costs_stores_at_most(tmp_path, place, kind):
    root, names = tmp_path / "root", keys(6)
    with leaving_no_trace():
        async with asyncio.timeout(HANG_SECONDS), open_files(options(root, capacity=2 << 20)) as tier:
            assert await tier.store(names) == [STORED] * 6
            replace_with(root / place, kind)
            stored = await tier.store(keys(3, start=50))
            await tier.backend.sweep()
            assert await tier.load(names) == [LOADED] * 6
            assert await tier.present(names) == 6
            assert {outcome.status for outcome in stored} <= {BlockStatus.STORED, BlockStatus.FAILED}
            if "new-" in place or "leases" in place:
                assert stored == [STORED] * 3, "what is not ours is in nobody's way"
                assert await tier.store(keys(3, start=60)) == [STORED] * 3
                assert account_is_true(tier)
                assert not any(name.startswith("sweep.") for name in tier.counters), "nor in the way of a sweep"
        async with asyncio.timeout(HANG_SECONDS), open_files(options(root, capacity=2 << 20)) as tier:
            assert await tier.load(names) == [LOADED] * 6
            replace_with(root / place, "nothing")
            assert await tier.store(keys(3, start=50)) != []
            assert await tier.load(keys(3, start=50)) == [LOADED] * 3


NEEDED = ["superblock", "epochs", "leases", "epochs/lock", "bucket-00"]
INSTEAD = ["a pipe", "a link to a device", "a link to nowhere", "a file"]


@pytest.mark.parametrize(
    ("place", "kind"), [pair for pair in product(NEEDED, INSTEAD) if pair != ("epochs/lock", "a file")]
)
async def test_something_else_in_the_place_of_what_a_root_needs_is_refused_or_costs_its_blocks(tmp_path, place, kind):
    root, names = tmp_path / "root", keys(6)
    with leaving_no_trace():
        async with asyncio.timeout(HANG_SECONDS), open_files(options(root, capacity=2 << 20)) as tier:
            await tier.store(names)
            replace_with(root / place, kind)
            ended = {outcome.status for outcome in await tier.load(names)}
            assert ended <= {BlockStatus.LOADED, BlockStatus.MISSING}
            await tier.store(keys(3, start=50))
            await tier.backend.sweep()
        with nullcontext() if place in ("bucket-00", "epochs/lock") else pytest.raises(RootError):
            async with asyncio.timeout(HANG_SECONDS), open_files(options(root, capacity=2 << 20)) as tier:
                assert {outcome.status for outcome in await tier.load(names)} <= {"loaded", "missing"}
                if place == "bucket-00":
                    assert not any(outcome.ok for outcome in await tier.store(keys(3, start=60)))
                else:
                    with pytest.raises(RootError):
                        await tier.backend.reset(1)


async def test_names_that_a_network_file_system_gives_are_counted_and_left_alone(tmp_path):
    """What is removed while a process on the same host has it open is kept by NFS under a name of its own."""
    root, names = tmp_path / "root", keys(80)
    async with open_files(options(root, capacity=2 << 20)) as tier:
        await tier.store(names[:20])
        hidden = root / "bucket-00" / ".nfs000000000012345600000001"
        hidden.write_bytes(bytes(20480))
        await tier.backend.sweep()
        bucket = tier.backend._root.buckets[0]
        assert bucket.locked(bucket.sweep) is None
        assert account_is_true(tier), "they take room"
        for start in range(0, 240, 30):
            assert await tier.store(keys(30, start=start)) != []
        assert tier.counters["evicted"] > 100
        assert hidden.exists()
        assert tier.counters["temporary.swept"] == 0
        hidden.unlink()
        assert bucket.locked(bucket.sweep) is None
        assert account_is_true(tier)


async def test_a_planted_block_that_is_swapped_while_it_is_opened_is_a_miss(tmp_path, monkeypatch):
    """Between the look and the opening: what comes in then is refused by the flags of the opening, without a wait."""
    for number, kind in enumerate([*KINDS, "nothing"]):
        root, (key,) = tmp_path / str(number), keys(1)
        async with asyncio.timeout(HANG_SECONDS), open_files(options(root, capacity=2 << 20)) as tier:
            await tier.store([key])
            path, stat = tier.path(key), os.stat

            def swapped(name, path=path, stat=stat, kind=kind, **where):
                status = stat(name, **where)
                if name == path.name:
                    monkeypatch.undo()
                    replace_with(path, kind)
                return status

            monkeypatch.setattr("os.stat", swapped)
            assert (await tier.load([key]))[0].status is BlockStatus.MISSING, kind
            assert temporaries(root) == []
            assert block_files(root) == ([] if kind in ("nothing", "a folder") else [path])

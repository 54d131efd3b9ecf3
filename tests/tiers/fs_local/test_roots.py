"""Roots: who may use them, what they may hold, several of them, and what is left when the tier is closed."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
from pydantic import ValidationError
from support_fs import PAGE, Tier, bytes_on_disk, keys, layout, open_tier, options
from support_paths import SUPPORT

from faults.machine.belongings import belongings, new_since
from kvtier.errors import (
    ConfigError,
    GeometryError,
    KVTierError,
    ResourceError,
    RootBusyError,
    RootDamagedError,
    RootError,
    UsageError,
)
from kvtier.options import share_of
from kvtier.testing.trace import leaving_no_trace
from kvtier.tier.contract import AnswersLookups, ProbesAlignment, Resettable, TierContext
from kvtier.tier.registry import DryRuns
from kvtier.types.geometry import Geometry
from kvtier.types.jobs import LOADED, STORED, DropReason, dropped
from kvtier.types.namespace import Namespace
from kvtier_fs import FSBackend, FSOptions, SharedFSOptions
from kvtier_fs.io.probe import probe_direct
from kvtier_fs.io.uring import probe_uring
from kvtier_fs.local.folder import SlabFolder
from kvtier_fs.local.opening import Hooks

MIB = 1 << 20


async def refusal(settings: FSOptions, shape=None, **changes) -> KVTierError:
    """What opening raises."""
    with pytest.raises(KVTierError) as caught:
        async with open_tier(settings, shape, **changes):
            pass
    assert "\n" not in str(caught.value)
    return caught.value


async def fill(tier: Tier, name: int = 0) -> list[bytes]:
    """Store until every slot of every region is taken; returns the keys."""
    names: list[bytes] = []
    for region in range(tier.space.num_regions):
        if region not in tier.region_sizes:
            formats = [tier.format_region(region, 0)]
        else:
            formats = []
        free = sum(1 for _ in tier.free_slots(0))
        while free:
            batch = keys(min(free, tier.rows.num_rows), start=name * 10**6 + len(names))
            assert await tier.store(batch, formats) == [STORED] * len(batch)
            names += batch
            formats = []
            free = sum(1 for _ in tier.free_slots(0))
    return names


async def test_files_are_0600_and_the_folder_0700_whatever_the_umask(tmp_path):
    for umask in (0o000, 0o277):
        root = tmp_path / f"root-{umask}"
        before = os.umask(umask)
        try:
            async with open_tier(options(root)) as tier:
                await tier.store_all(keys(4))
        finally:
            os.umask(before)
        assert stat.S_IMODE(root.stat().st_mode) == 0o700
        names = {path.name for path in root.iterdir()}
        assert {"superblock", "lock", "slab-00000"} < names
        assert {stat.S_IMODE(path.stat().st_mode) for path in root.iterdir()} == {0o600}


async def test_the_manifest_and_the_lock_can_be_read_by_people(tmp_path):
    async with open_tier(options(tmp_path / "root"), tag="for people") as tier:
        namespace = Namespace(tier.geometry.layout, tag="for people")
        path = tmp_path / "root" / f"manifest-{namespace.digest().hex()}.json"
        assert json.loads(path.read_text()) == json.loads(namespace.manifest())
        assert json.loads((tmp_path / "root" / "lock").read_text())["pid"] == os.getpid()


async def test_a_folder_that_others_may_write_is_refused(tmp_path):
    root = tmp_path / "root"
    for mode in (0o720, 0o702, 0o1777, 0o770):
        root.mkdir(exist_ok=True)
        root.chmod(mode)
        assert "chmod go-w" in str(await refusal(options(root)))
    root.chmod(0o755)
    async with open_tier(options(root)):
        pass


async def test_a_root_that_is_no_folder_is_refused_in_one_clear_line(tmp_path):
    (tmp_path / "file").write_text("")
    assert "is not a folder" in str(await refusal(options(tmp_path / "file")))
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    assert "name the folder it leads to" in str(await refusal(options(tmp_path / "link")))
    assert "is not there" in str(await refusal(options(tmp_path / "no" / "such")))
    assert "is not there" in str(await refusal(options(tmp_path / "absent", create=False)))
    assert not (tmp_path / "absent").exists()


@pytest.mark.parametrize("name", ["superblock", "lock", "slab-00000"])
@pytest.mark.parametrize("kind", ["fifo", "folder", "link", "socket"])
async def test_things_planted_in_the_place_of_our_files_are_refused_without_a_hang(tmp_path, name, kind):
    root = tmp_path / "root"
    async with open_tier(options(root)) as tier:
        await tier.store_all(keys(2))
    (root / name).unlink()
    victim = tmp_path / "victim"
    victim.write_text("precious")
    if kind == "fifo":
        os.mkfifo(root / name)
    elif kind == "folder":
        (root / name).mkdir()
    elif kind == "link":
        (root / name).symlink_to(victim)
    else:
        os.mknod(root / name, stat.S_IFSOCK | 0o600)
    error = await asyncio.wait_for(refusal(options(root)), 10)
    assert isinstance(error, RootError)
    assert name in str(error)
    assert "remove it" in str(error)
    assert victim.read_text() == "precious"


async def test_no_permission_is_one_clear_line():
    if os.geteuid() != 0:
        pytest.skip("needs root to become someone else")
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        root, new = Path(name) / "root", Path(name) / "new"
        root.mkdir(mode=0o700)
        os.seteuid(65534)
        try:
            assert "no permission; make this user its owner" in str(await refusal(options(root)))
            assert "cannot be created (Permission denied)" in str(await refusal(options(new)))
            problems = FSBackend(options(root, new)).dry_run(Geometry(layout(16384), PAGE), True).problems
            assert ["no permission" in problem for problem in problems] == [True, True]
        finally:
            os.seteuid(0)


OWNER = """
import asyncio, sys
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from support_fs import open_tier, options
async def main():
    async with open_tier(options(Path(sys.argv[1]))):
        print("open", flush=True)
        sys.stdin.read()
asyncio.run(main())
"""


async def test_a_root_has_one_owner_and_the_error_of_a_second_one_names_it(tmp_path):
    root = tmp_path / "root"
    command = [sys.executable, "-c", OWNER, str(root), str(SUPPORT)]
    owner = await asyncio.create_subprocess_exec(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert owner.stdout is not None
    try:
        assert await owner.stdout.readline() == b"open\n"
        error = await refusal(options(root))
        assert isinstance(error, RootBusyError)
        assert f"process {owner.pid} on " in str(error)
        geometry = Geometry(layout(16384), PAGE)
        assert f"process {owner.pid} on " in FSBackend(options(root)).dry_run(geometry, True).problems[0]
        (root / "lock").write_bytes(b'{"pid": [], "host')
        assert "another process" in str(await refusal(options(root)))
    finally:
        owner.kill()
        await owner.communicate()
    async with open_tier(options(root)) as tier:
        await tier.store_all(keys(1))


async def test_a_busy_root_is_waited_for(tmp_path):
    first = open_tier(options(tmp_path / "root"))
    await first.__aenter__()
    async with asyncio.TaskGroup() as tasks:
        second = open_tier(options(tmp_path / "root", owner_timeout_seconds=60.0))
        opening = tasks.create_task(second.__aenter__())
        await asyncio.wait([opening], timeout=0.3)
        assert not opening.done()
        await first.__aexit__(None, None, None)
    await second.__aexit__(None, None, None)


async def test_a_tool_that_tests_the_lock_of_a_root_keeps_no_tier_out(tmp_path):
    class TestedMeanwhile(SlabFolder):
        tests = 1

        def try_lock(self, shared: bool = False) -> bool:
            tested, self.tests = self.tests, 0
            return not tested and super().try_lock(shared)

    async with open_tier(options(tmp_path / "root"), hooks=Hooks(folder=TestedMeanwhile)):
        pass


def test_engines_of_one_file_get_a_folder_and_a_part_each(tmp_path):
    whole = options(tmp_path / "root", capacity=10 * MIB)
    parts = [whole.share(index, 3) for index in range(3)]
    assert sum(part.capacity for part in parts) <= whole.capacity
    assert len({root for part in parts for root in part.roots}) == 3
    assert whole.share(0, 1) == whole
    shared = SharedFSOptions(root=str(tmp_path / "root"), capacity=10 * MIB)
    assert share_of(shared, 1, 2) == shared
    with pytest.raises(ValueError, match="no engine 3 among 3"):
        share_of(whole, 3, 3)


async def test_several_roots_share_blocks_and_a_missing_one_takes_only_its_own(tmp_path):
    roots = [tmp_path / name for name in ("a", "b", "c")]
    settings = options(*roots, capacity=12 * MIB)
    async with open_tier(settings) as tier:
        assert len(tier.opened.space.regions_by_root) == 3
        assert len(set(tier.opened.space.regions_by_root)) == 1
        names = await fill(tier)
        assert await tier.load_all(names) == [LOADED] * len(names)
    each = len(names) // 3
    (roots[1] / "superblock").rename(tmp_path / "kept")
    os.rename(roots[1], tmp_path / "away")
    without = options(*roots, capacity=12 * MIB, create=False)
    async with open_tier(without) as tier:
        assert tier.opened.notes == (f"{roots[1]}: is not there; running without it",)
        assert [bool(count) for count in tier.opened.space.regions_by_root] == [True, False, True]
        found = list(tier.opened.recovered.keys)
        assert len(found) == 2 * each
        assert await tier.load_all(found) == [LOADED] * len(found)
        assert tier.opened.capacity_bytes == 8 * MIB
    os.rename(tmp_path / "away", roots[1])
    (tmp_path / "kept").rename(roots[1] / "superblock")
    # Regions are numbered over the roots, but on disk within their root: another order changes nothing.
    async with open_tier(options(*reversed(roots), capacity=12 * MIB)) as tier:
        assert sorted(tier.opened.recovered.keys) == sorted(names)
        assert await tier.load_all(names) == [LOADED] * len(names)
    for root in roots:
        os.rename(root, f"{root}-away")
    assert "is not there" in str(await refusal(without))


async def test_a_bad_root_beside_good_ones_is_an_error_and_lets_go_of_the_good(tmp_path):
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad").chmod(0o777)
    assert "bad" in str(await refusal(options(tmp_path / "good", tmp_path / "bad")))
    async with open_tier(options(tmp_path / "good")):
        pass


@pytest.mark.parametrize("capacity", [1 * MIB, 3 * MIB + 12345, 8 * MIB])
@pytest.mark.parametrize("count", [1, 2])
async def test_the_capacity_holds_at_every_moment_seen_from_outside(tmp_path, capacity, count):
    roots = [tmp_path / f"root-{i}" for i in range(count)]
    peaks: list[int] = []
    watching = threading.Event()
    watching.set()

    def watch() -> None:
        while watching.is_set():
            try:
                peaks.append(max((bytes_on_disk(root) for root in roots if root.exists()), default=0))
            except FileNotFoundError:
                continue  # a file was replaced under our eyes
            time.sleep(0.0005)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        for session in range(3):
            async with open_tier(options(*roots, capacity=capacity), tag=f"model {session % 2}") as tier:
                tier.directory.clear()
                names = await fill(tier, session)
                assert await tier.load_all(names[:40]) == [LOADED] * 40
    finally:
        watching.clear()
        watcher.join()
    assert len(peaks) > 10
    assert max(peaks) <= capacity // count
    assert bytes_on_disk(*roots) > capacity * 0.75


async def test_many_sessions_and_namespaces_stay_within_the_capacity(tmp_path):
    settings = options(tmp_path / "root", capacity=1 * MIB)
    for session in range(40):
        async with open_tier(settings, tag=f"model {session}" + "x" * 2000) as tier:
            if session == 0:
                await fill(tier)
        assert bytes_on_disk(tmp_path / "root") <= 1 * MIB
    manifests = list((tmp_path / "root").glob("manifest-*"))
    assert 0 < len(manifests) < 10


async def test_a_smaller_capacity_gives_space_back_and_a_larger_one_keeps_what_is_there(tmp_path):
    root = tmp_path / "root"
    async with open_tier(options(root, capacity=8 * MIB)) as tier:
        names = await fill(tier)
    async with open_tier(options(root, capacity=3 * MIB)) as tier:
        assert bytes_on_disk(root) <= 3 * MIB
        found = list(tier.opened.recovered.keys)
        assert 0 < len(found) < len(names)
        assert await tier.load_all(found) == [LOADED] * len(found)
    async with open_tier(options(root, capacity=16 * MIB)) as tier:
        assert list(tier.opened.recovered.keys) == found
        await fill(tier, 1)
        assert 8 * MIB < bytes_on_disk(root) <= 16 * MIB
    async with open_tier(options(root, capacity=300_000), layout(4096)) as tier:
        assert "starts empty" in tier.opened.notes[0]
        assert bytes_on_disk(root) <= 300_000


async def test_a_budget_too_small_names_the_bytes_needed(tmp_path):
    error = await refusal(options(tmp_path / "root", capacity=100_000), layout(65536))
    assert isinstance(error, GeometryError)
    needed = int(str(error).split("at least ")[1].split(":")[0])
    async with open_tier(options(tmp_path / "root", capacity=needed), layout(65536)) as tier:
        await fill(tier)
        assert bytes_on_disk(tmp_path / "root") <= needed


async def test_min_free_bytes_are_left_to_others(tmp_path):
    status = os.statvfs(tmp_path)
    all_there_is = status.f_blocks * status.f_frsize  # others may free some meanwhile
    async with open_tier(options(tmp_path / "root", min_free_bytes=all_there_is)) as tier:
        assert await tier.store(keys(2), [tier.format_region(0, 0)]) == [dropped(DropReason.DISK_FULL)] * 2


async def test_without_preallocation_the_bound_still_holds(tmp_path):
    def no_support(path: str, settings: FSOptions) -> SlabFolder:
        folder = SlabFolder(path, settings)
        folder.preallocates = False
        return folder

    async with open_tier(options(tmp_path / "root"), hooks=Hooks(folder=no_support)) as tier:
        names = await fill(tier)
        assert await tier.load_all(names) == [LOADED] * len(names)
        assert bytes_on_disk(tmp_path / "root") <= 8 * MIB


async def test_a_reset_stays_reset(tmp_path):
    roots = [tmp_path / "a", tmp_path / "b"]
    async with open_tier(options(*roots)) as tier:
        assert isinstance(tier.backend, Resettable)
        await fill(tier)
        await tier.backend.reset(1)
        # Nothing is closed in order: what is on disk now is what a crash would leave.
        copies = [root.rename(f"{root}-copy") for root in roots]
        for root, copy in zip(roots, copies, strict=True):
            shutil.copytree(copy, root)
    async with open_tier(options(*roots)) as tier:
        assert (tier.opened.epoch, list(tier.opened.recovered.keys)) == (1, [])
        tier.directory.clear()
        after = await fill(tier, 1)
    async with open_tier(options(*roots)) as tier:
        assert (tier.opened.epoch, len(tier.opened.recovered.keys)) == (1, len(after))


async def test_a_reset_that_reached_one_root_only_counts_for_all(tmp_path):
    a, b = tmp_path / "a", tmp_path / "b"
    async with open_tier(options(a, b)) as tier:
        await fill(tier)
        old = (b / "superblock").read_bytes()
        await tier.backend.reset(4)
    (b / "superblock").write_bytes(old)
    async with open_tier(options(a, b)) as tier:
        assert (tier.opened.epoch, list(tier.opened.recovered.keys)) == (4, [])
    async with open_tier(options(b, capacity=4 * MIB)) as tier:
        assert (tier.opened.epoch, list(tier.opened.recovered.keys)) == (4, [])


async def test_a_root_of_slabs_without_a_superblock_is_left_alone_and_so_is_an_unknown_version(tmp_path):
    root = tmp_path / "root"
    async with open_tier(options(root)) as tier:
        await tier.store_all(keys(4))
    good = (root / "superblock").read_bytes()
    (root / "superblock").write_bytes(good[:24] + b"\x09" + good[25:4096] + good[:24] + b"\x09" + good[25:4096])
    slab = (root / "slab-00000").stat()
    assert "format version 9" in str(await refusal(options(root)))
    assert (root / "slab-00000").stat().st_mtime_ns == slab.st_mtime_ns
    for damaged in (b"garbage" * 1000, b""):
        (root / "superblock").write_bytes(damaged)
        error = await refusal(options(root))
        assert isinstance(error, RootDamagedError)
        assert f"find {root} -mindepth 1 -delete" in str(error)
        assert (root / "superblock").read_bytes() == damaged
        assert (root / "slab-00000").stat().st_mtime_ns == slab.st_mtime_ns
    (root / "superblock").write_bytes(good)
    async with open_tier(options(root)) as tier:
        assert len(tier.opened.recovered.keys) == 4, "nothing was touched"


async def test_a_root_whose_first_opening_never_completed_is_made_anew(tmp_path):
    root = tmp_path / "root"
    root.mkdir(mode=0o700)
    (root / "superblock").write_bytes(b"KVTIERSB"[:4])
    async with open_tier(options(root)) as tier:
        await tier.store_all(keys(4))
    async with open_tier(options(root)) as tier:
        assert len(tier.opened.recovered.keys) == 4


async def test_another_alignment_is_refused(tmp_path):
    async with open_tier(options(tmp_path / "root")):
        pass
    error = await refusal(options(tmp_path / "root"), alignment=4 * PAGE)
    assert isinstance(error, RootError)
    assert "aligned to" in str(error)
    assert isinstance(await refusal(options(tmp_path / "new"), layout(512), alignment=512), GeometryError)


async def test_nothing_is_left_when_the_tier_is_closed(tmp_path):
    loop = asyncio.get_running_loop()
    engines = ["threads"] if probe_uring() else ["threads", "io_uring"]
    for engine in engines:
        before = belongings()
        for direct in ("off", "auto"):
            settings = options(tmp_path / "a", tmp_path / "b", io_engine=engine, direct=direct)
            async with open_tier(settings) as tier:
                await tier.backend.probe_alignment()
                names = await fill(tier, 1)
                await tier.load_all(names)
                await tier.backend.reset(tier.epoch + 1)
            await tier.backend.close()
        await refusal(options(tmp_path / "a", capacity=1))
        assert not new_since(before)
    assert loop._default_executor is None, "no file call on the loop's own threads"  # type: ignore[attr-defined]


async def test_the_alignment_can_be_probed_before_the_root_exists_and_leaves_nothing(tmp_path):
    backend = FSBackend(options(tmp_path / "absent", direct="auto"))
    assert isinstance(backend, ProbesAlignment)
    alignment = await backend.probe_alignment()
    assert alignment >= PAGE
    assert alignment & (alignment - 1) == 0
    assert await FSBackend(options(tmp_path / "no" / "such", direct="auto")).probe_alignment() == PAGE
    assert list(tmp_path.iterdir()) == []


async def test_memory_file_systems_work_buffered_and_say_so(tmp_path):
    root = f"/dev/shm/kvtier-test-fs-{os.getpid()}"
    os.mkdir(root, 0o700)
    try:
        async with open_tier(options(Path(root), direct="auto", io_engine="auto")) as tier:
            assert tier.opened.mode.endswith("buffered")
            await tier.store_all(keys(8))
            assert await tier.load_all(keys(8)) == [LOADED] * 8
        assert "direct I/O is required" in str(await refusal(options(Path(root), direct="required")))
    finally:
        shutil.rmtree(root)


async def test_where_io_uring_is_denied_threads_serve_and_a_note_says_so(tmp_path, monkeypatch):
    import kvtier_fs.roots.disk

    monkeypatch.setattr(kvtier_fs.roots.disk, "probe_uring", lambda: "the kernel offers no io_uring (denied)")
    async with open_tier(options(tmp_path / "root", io_engine="auto")) as tier:
        assert tier.opened.mode.startswith("slab, threads")
        assert tier.opened.notes == ("the kernel offers no io_uring (denied); threads serve instead",)
        await tier.store_all(keys(4))
    error = await refusal(options(tmp_path / "root", io_engine="io_uring"))
    assert isinstance(error, ResourceError)
    assert "choose auto or threads" in str(error)


async def test_network_file_systems_are_refused_unless_forced(tmp_path, monkeypatch):
    import kvtier_fs.roots.folder

    monkeypatch.setattr(kvtier_fs.roots.folder, "filesystem_magic", lambda fd: 0x6969)
    assert "network file system (NFS)" in str(await refusal(options(tmp_path / "root")))
    async with open_tier(options(tmp_path / "root", allow_network_fs=True)) as tier:
        await tier.store_all(keys(1))


async def test_a_dry_run_says_what_opening_would_and_leaves_nothing(tmp_path):
    geometry = Geometry(layout(16384, 8192), PAGE)
    backend = FSBackend(options(tmp_path / "a", tmp_path / "b", direct="auto"))
    assert isinstance(backend, DryRuns)
    planned = backend.dry_run(geometry, True)
    assert planned.problems == ()
    assert planned.notes == tuple(f"{tmp_path / name}: will be created" for name in "ab")
    assert list(tmp_path.iterdir()) == []
    async with open_tier(backend.options, layout(16384, 8192)) as tier:
        assert planned.space == tier.opened.space
        assert planned.mode == tier.opened.mode
    assert backend.dry_run(geometry, True).space == planned.space
    assert backend.dry_run(geometry, False).space == planned.space
    small = FSBackend(options(tmp_path / "no" / "a", capacity=1000)).dry_run(geometry, True)
    assert len(small.problems) == 2
    assert "is not there" in small.problems[0]
    assert "at least" in small.problems[1]


@pytest.mark.parametrize(
    "change",
    [
        {"roots": []},
        {"roots": ["relative"]},
        {"roots": ["/a/../b"]},
        {"roots": ["/a", "/a/"]},
        {"roots": ["/a\0b"]},
        {"capacity": "10 bananas"},
        {"min_free_bytes": -1},
        {"layout": "heap"},
        {"io_depth": 0},
        {"unknown": 1},
    ],
)
def test_bad_options_are_refused(change):
    with pytest.raises(ValidationError):
        FSOptions.model_validate({"roots": ["/x"], "capacity": "1GiB"} | change)


async def test_the_contract_of_use(tmp_path):
    with pytest.raises(UsageError):
        FSBackend(Tier)  # type: ignore[arg-type]
    backend = FSBackend(options(tmp_path / "root"))
    geometry = Geometry(layout(16384), PAGE)
    with pytest.raises(UsageError):
        await backend.open(TierContext("fs", geometry, Namespace(geometry.layout), time.monotonic))
    with pytest.raises(UsageError):
        await backend.reset(1)
    assert not isinstance(backend, AnswersLookups)
    await backend.close()
    await backend.close()
    assert issubclass(ConfigError, KVTierError)


async def test_the_bound_of_the_directory_s_memory_takes_slots_not_promises(tmp_path):
    roomy = FSOptions(type="fs", roots=[str(tmp_path / "a")], capacity=64 << 20, min_free_bytes=1)
    bounded = FSOptions(
        type="fs", roots=[str(tmp_path / "b")], capacity=64 << 20, min_free_bytes=1, index_bytes_max=500 * 220
    )
    async with open_tier(roomy) as tier:
        assert tier.opened.space.num_slot_ids > 500
    async with open_tier(bounded) as tier:
        assert 100 < tier.opened.space.num_slot_ids <= 500


def test_leaving_a_root_closes_and_unlocks_all_of_it_whatever_one_file_says(tmp_path, monkeypatch):
    settings = options(tmp_path / "root")
    folder, other = SlabFolder(settings.roots[0], settings), SlabFolder(settings.roots[0], settings)
    close = os.close

    def complaining(fd: int) -> None:
        close(fd)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with leaving_no_trace():
        assert folder.enter()
        assert folder.try_lock()
        assert folder.slab(0) != folder.slab(1)
        monkeypatch.setattr("kvtier_fs.local.folder.os.close", complaining)
        folder.leave()
        monkeypatch.undo()
    assert other.enter()
    assert other.try_lock()
    other.leave()


@pytest.mark.parametrize("call", ["fstat", "fchmod"])
def test_a_file_that_is_opened_and_then_cannot_be_used_is_closed(tmp_path, monkeypatch, call):
    settings = options(tmp_path / "root")
    folder = SlabFolder(settings.roots[0], settings)
    assert folder.enter()
    (tmp_path / "root" / "lock").touch(mode=0o644)

    def failing(*args: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(f"kvtier_fs.local.folder.os.{call}", failing)
    with leaving_no_trace(), pytest.raises(OSError, match=os.strerror(errno.EIO)):
        folder.try_lock()
    monkeypatch.undo()
    folder.leave()


def test_a_folder_that_cannot_be_given_its_mode_is_not_left_behind(tmp_path, monkeypatch):
    settings = options(tmp_path / "root")

    def failing(*args: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr("kvtier_fs.local.folder.os.chmod", failing)
    with leaving_no_trace(), pytest.raises(RootError, match="no permission"):
        SlabFolder(settings.roots[0], settings).enter()
    assert not (tmp_path / "root").exists()


def test_a_disk_without_nameless_files_is_probed_and_nothing_stays_open_if_that_fails(tmp_path, monkeypatch):
    opened, fd = os.open, os.open(tmp_path, os.O_RDONLY)

    def without(path: str, flags: int, *args: object, **more: object) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        return opened(path, flags & ~os.O_DIRECT, *args, **more)

    def failing(*args: object, **more: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("kvtier_fs.io.probe.os.open", without)
    with leaving_no_trace():
        assert probe_direct(fd).alignment >= PAGE
        assert not list(tmp_path.iterdir())
        monkeypatch.setattr("kvtier_fs.io.probe.os.unlink", failing)
        assert "refused" in probe_direct(fd).reason
    os.close(fd)

"""The shared region: exact places, exact sizes, and only the right file is ever mapped."""

from __future__ import annotations

import errno
import itertools
import mmap
import os
import socket
import stat
import threading
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support_region import geometry, named

from faults.machine.belongings import private_regions
from kvtier.errors import GeometryError, RegionError, UsageError
from kvtier.tier.contract import TierContext
from kvtier.types.arrays import int_array
from kvtier.types.geometry import Geometry, GroupLayout, KVLayout, TensorRef
from kvtier.types.namespace import Namespace
from kvtier_cpu import CPUBackend, CPUOptions, RegionSpec, Sharing, open_region
from kvtier_cpu.region import populate
from kvtier_cpu.region.attaching import attach_region
from kvtier_cpu.region.control_area import ControlShape
from kvtier_cpu.region.opening import RegionHost
from kvtier_cpu.region.rendezvous import Names, Patience, open_claim, sweep_leftovers


def anonymous(**more: object) -> RegionSpec:
    return RegionSpec(
        **{"geometry": geometry(), "num_rows": 16, "namespace_digest": b"n" * 16, "serves": (0, 1), **more}
    )


# ---- places


def test_rows_are_page_aligned_and_exactly_as_many_bytes_as_asked() -> None:
    region = open_region(anonymous())
    view = region.view
    assert view.shape == (16, region.row_bytes)
    assert view.dtype == np.uint8
    assert view.ctypes.data % mmap.PAGESIZE == 0
    assert view.strides == (region.row_bytes, 1)
    assert region.row_bytes % mmap.PAGESIZE == 0
    assert os.fstat(region.descriptors[0]).st_size == 16 * region.row_bytes
    assert not view.any()
    del view
    region.close()


def test_rows_never_overlap_and_are_buffers_for_io(tmp_path: Path) -> None:
    region = open_region(anonymous())
    for row in range(region.num_rows):
        region.row(row)[:] = bytes([row + 1]) * region.row_bytes
    assert (region.view == np.arange(1, 17, dtype=np.uint8)[:, None]).all()
    with (tmp_path / "slot").open("w+b") as file:
        file.write(region.row(3))
        file.seek(0)
        file.readinto(region.row(9))
    assert (region.view[9] == 4).all()
    with pytest.raises(UsageError):
        region.row(16)
    region.close()


@pytest.mark.parametrize(
    "shape", [ControlShape(1, 4096, 1, 1, 1), ControlShape(1001, 8192, 3, 3, 4), ControlShape(8, 4096, 8, 1, 9)]
)
def test_the_sections_of_the_control_area_never_overlap(shape: ControlShape) -> None:
    sections = shape.sections
    stride = sections["valid"].shape[1]
    assert stride * 8 % 64 == 0
    assert stride >= shape.num_rows
    words = stride * 8
    sizes = (shape.participants * 8, shape.world_size * 32, shape.copies * words, shape.world_size * words)
    sizes = (*sizes, shape.num_rows * 16, shape.world_size * 8192, (shape.world_size + 1) * 64)
    starts = [sections.fields[name][1] for name in sections.names]
    assert starts[:2] == [0, mmap.PAGESIZE]
    for start, size, following in zip(starts[1:], sizes, [*starts[2:], shape.size_bytes], strict=True):
        assert start % 64 == 0
        assert start + size <= following


def test_a_workers_note_is_read_back_and_a_long_one_refused() -> None:
    region = open_region(anonymous(note="weights 7f3a, größer"))
    assert [region.note(worker) for worker in range(2)] == ["weights 7f3a, größer"] * 2
    with pytest.raises(UsageError, match="8184 bytes"):
        region.write_note(0, "x" * 8185)
    assert region.note(0) == "weights 7f3a, größer"
    region.close()


def test_rows_that_are_not_whole_pages_are_refused() -> None:
    layout = KVLayout((GroupLayout((TensorRef(0, 1000),)),))
    with pytest.raises(GeometryError, match="whole pages"):
        anonymous(geometry=Geometry(layout, 512), serves=())


# ---- stamps, uses, checksums


def test_a_row_counts_as_stamped_only_with_the_issued_generation_of_every_worker() -> None:
    region = open_region(anonymous())
    rows = int_array([2, 7, 11])
    assert region.stamped(rows, int_array([0, 0, 0])).tolist() == [False] * 3, "fresh memory is no generation"
    region.stamp(0, rows, int_array([0, 5, 9]))
    assert region.stamped(rows, int_array([0, 5, 9])).tolist() == [False] * 3
    region.stamp(1, rows, int_array([0, 5, 8]))
    assert region.stamped(rows, int_array([0, 5, 9])).tolist() == [True, True, False]
    assert region.stamped(rows, int_array([1, 6, 9])).tolist() == [False] * 3
    assert not region.stamped(int_array([3]), int_array([5])).any()
    region.close()


def test_one_copy_for_all_workers_is_stamped_by_worker_0_alone_and_used_by_each() -> None:
    region = open_region(anonymous(geometry=geometry(replicated=True)))
    rows = int_array([2, 7])
    with pytest.raises(UsageError, match="worker 0 stores"):
        region.stamp(1, rows, rows)
    region.stamp(0, rows, rows)
    assert region.stamped(rows, rows).all()
    region.end_use(1, rows)
    assert [region.uses_ended(worker, rows).tolist() for worker in range(2)] == [[0, 0], [1, 1]]
    region.close()


def test_a_worker_that_never_published_its_geometry_makes_nothing_whole() -> None:
    region = open_region(anonymous(serves=(0,)))
    rows = int_array([1])
    region.stamp(0, rows, rows)
    region.stamp(1, rows, rows)
    assert not region.stamped(rows, rows).any()
    region.publish_worker(1, region.spec.digest)
    assert region.stamped(rows, rows).all()
    region.close()


def test_uses_are_counted_for_each_worker_and_row_also_when_a_job_names_a_row_twice() -> None:
    region = open_region(anonymous())
    region.end_use(1, int_array([4, 4, 6]))
    region.end_use(1, int_array([6]))
    assert region.uses_ended(1, int_array([4, 5, 6])).tolist() == [2, 0, 2]
    assert region.uses_ended(0, int_array([4, 5, 6])).tolist() == [0, 0, 0]
    region.close()


def test_checksums_stay_with_their_row() -> None:
    region = open_region(anonymous())
    for row in range(16):
        region.set_checksum(row, bytes([row]) * 16)
    assert [region.checksum(row) for row in range(16)] == [bytes([row]) * 16 for row in range(16)]
    with pytest.raises(UsageError):
        region.set_checksum(0, b"short")
    region.close()


@pytest.mark.parametrize("bad", [-1, 16])
def test_ids_out_of_range_are_refused_and_write_nothing(bad: int) -> None:
    region = open_region(anonymous())
    before = region._valid.copy()
    for call in (
        lambda: region.stamp(0, int_array([1, bad]), int_array([1, 1])),
        lambda: region.end_use(0, int_array([bad])),
        lambda: region.stamp(2, int_array([1]), int_array([1])),
        lambda: region.checksum(bad),
        lambda: region.set_checksum(bad, bytes(16)),
    ):
        with pytest.raises(UsageError):
            call()
    assert (region._valid == before).all()
    region.close()


# ---- closing


def test_close_twice_and_views_outlive_it() -> None:
    region = open_region(anonymous())
    tensor, view = torch.from_numpy(region.view), region.view
    view[3] = 9
    region.close()
    region.close()
    assert (view[3] == 9).all()
    assert bool((tensor[3] == 9).all())
    tensor[3] = 1
    with pytest.raises(UsageError, match="closed"):
        _ = region.view
    with pytest.raises(UsageError, match="closed"):
        region.stamp(0, int_array([0]), int_array([1]))


def test_close_gives_memory_and_descriptors_back() -> None:
    descriptors = set(os.listdir("/proc/self/fd"))
    before = private_regions()
    for spec in (anonymous(), anonymous(sharing=Sharing.PRIVATE), named("/dev/shm", f"back-{os.getpid()}", 2)):
        region = open_region(spec)
        assert private_regions() == before + (spec.sharing is Sharing.PRIVATE)
        assert f"{region.view.ctypes.data:x}-" in Path("/proc/self/maps").read_text()
        region.close()
    maps = Path("/proc/self/maps").read_text()
    assert "memfd:kvtier" not in maps
    assert "/dev/shm/kvtier" not in maps
    assert private_regions() == before
    assert set(os.listdir("/proc/self/fd")) <= descriptors


# ---- memory of one process


def test_private_memory_holds_rows_for_this_process_and_zeros_for_a_forked_child() -> None:
    region = open_region(anonymous(sharing=Sharing.PRIVATE))
    rows = int_array([3])
    region.view[:] = 7
    region.stamp(0, rows, rows)
    region.stamp(1, rows, rows)
    child = os.fork()
    if not child:
        empty = not region.view.any() and not region.stamped(rows, rows).any()
        region.view[:] = 9
        os._exit(0 if empty else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert (region.view == 7).all()
    assert region.stamped(rows, rows).all()
    assert region.complete
    assert region.view.ctypes.data % mmap.PAGESIZE == 0
    with pytest.raises(UsageError, match="memfd"):
        _ = region.descriptors
    region.close()


def private(participant: int, engine_id: str, **more: object) -> RegionSpec:
    """One side of a region that two participants of one process share: worker 0 makes it, the coordinator joins it."""
    sharing = Sharing.NAMED if participant else Sharing.PRIVATE
    return replace(named("/dev/shm", engine_id, 2, participant, geometry=geometry(1)), sharing=sharing, **more)


def test_two_participants_of_one_process_share_private_rows_until_both_have_closed() -> None:
    engine_id, before = f"one-{os.getpid()}", private_regions()
    worker = open_region(private(0, engine_id, note="worker"))
    assert not worker.complete
    coordinator = open_region(private(1, engine_id))
    assert coordinator.spec.sharing is Sharing.PRIVATE
    assert private_regions() == before + 1
    assert worker.complete
    assert coordinator.complete
    assert coordinator.populated is worker.populated
    assert coordinator.note(0) == "worker"
    rows = int_array([3])
    worker.view[3] = 7
    worker.stamp(0, rows, rows)
    worker.end_use(0, rows)
    assert (coordinator.view[3] == 7).all()
    assert coordinator.stamped(rows, rows).all()
    assert coordinator.uses_ended(0, rows) == 1
    worker.close()
    assert (coordinator.view[3] == 7).all()
    coordinator.close()
    assert private_regions() == before


def test_private_rows_are_found_by_their_own_engine_alone_and_only_while_they_are_open() -> None:
    engine_id = f"alone-{os.getpid()}"
    worker = open_region(private(0, engine_id))
    with pytest.raises(RegionError, match="running twice"):
        open_region(private(0, engine_id))
    with pytest.raises(RegionError, match="another model"):
        open_region(private(1, engine_id, namespace_digest=b"o" * 16))
    worker.close()
    for other in (engine_id, f"other-{os.getpid()}"):
        waiting = open_region(private(0, f"waiting-{os.getpid()}"))
        coordinator = open_region(private(1, other))
        assert coordinator.spec.sharing is Sharing.NAMED
        coordinator.close()
        waiting.close()


def test_private_memory_that_a_fork_would_copy_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def old_kernel(pages: mmap.mmap, start: int, length: int, advice: int) -> int:
        return errno.EINVAL if advice == populate.MADV_WIPEONFORK else 0

    monkeypatch.setattr(populate, "_madvise", old_kernel)
    assert not populate.private_works()
    with pytest.raises(RegionError, match="kept from a fork"):
        open_region(anonymous(sharing=Sharing.PRIVATE))


@pytest.mark.parametrize(("world_size", "options", "kernel", "expected"), [
    (1, {}, True, Sharing.PRIVATE),
    (1, {}, False, Sharing.MEMFD),
    (1, {"huge_pages": False}, True, Sharing.MEMFD),
    (1, {"populate": False}, True, Sharing.MEMFD),
    (1, {"shared": "memfd"}, True, Sharing.MEMFD),
    (2, {}, True, Sharing.NAMED),
])  # fmt: skip
async def test_one_process_alone_gets_private_memory_where_that_has_huge_pages(
    monkeypatch: pytest.MonkeyPatch, world_size: int, options: dict[str, object], kernel: bool, expected: Sharing
) -> None:
    monkeypatch.setattr("kvtier_cpu.backend.private_works", lambda: kernel)
    layout = geometry(world_size)
    tier = CPUBackend(CPUOptions(cpu_bytes_to_use=4 * layout.row_bytes, **options))
    engine_id = f"auto-{os.getpid()}"
    opened = await tier.open(TierContext("cpu", layout, Namespace(layout.layout), time.monotonic, engine_id))
    assert tier.rows.spec.sharing is expected
    assert opened.mode.startswith(expected)
    await tier.close()


# ---- descriptors passed on


def test_a_memfd_region_is_shared_by_its_descriptors() -> None:
    owner = open_region(anonymous(participants=2, serves=(0,)))
    peer = attach_region(anonymous(participants=2, participant=1, serves=(1,)), *owner.descriptors)
    owner.view[1] = 5
    assert (peer.view[1] == 5).all()
    assert owner.complete
    assert peer.incarnation == owner.incarnation
    with pytest.raises(RegionError, match="already"):
        attach_region(anonymous(participants=2, participant=1, serves=(1,)), *owner.descriptors)
    peer.close()
    owner.close()


@pytest.mark.parametrize(
    "other", [{"num_rows": 15}, {"namespace_digest": b"m" * 16}, {"geometry": geometry(factor=1)}, {"participants": 3}]
)
def test_descriptors_of_another_region_are_refused(other: dict[str, object]) -> None:
    owner = open_region(anonymous(participants=2, serves=(0,)))
    with pytest.raises(RegionError):
        attach_region(anonymous(**{"participants": 2, "participant": 1, "serves": (), **other}), *owner.descriptors)
    owner.close()


def test_descriptors_that_could_shrink_under_us_are_refused() -> None:
    spec = anonymous(participants=2, participant=1, serves=())
    loose = [os.memfd_create("loose", os.MFD_ALLOW_SEALING) for _ in range(2)]
    for fd, size in zip(loose, (spec.size_bytes, spec.shape.size_bytes), strict=True):
        os.ftruncate(fd, size)
    with pytest.raises(RegionError):
        attach_region(spec, *loose)
    for fd in loose:
        os.close(fd)


# ---- names and what may be found under them


def test_a_name_tells_nothing_and_goes_once_all_have_mapped(shm: Path) -> None:
    first = open_region(named(shm, "engine with a secret", 2, 0))
    found = sorted(os.listdir(shm))
    assert [name.rpartition(".")[2] for name in found] == ["control", "rows"]
    assert not any("secret" in name for name in found)
    for name in found:
        assert stat.S_IMODE((shm / name).stat().st_mode) == 0o600
    assert (shm / found[1]).stat().st_size == first.spec.size_bytes
    second = open_region(named(shm, "engine with a secret", 2, 1))
    assert os.listdir(shm) == []
    assert first.complete
    second.close()
    first.close()


def test_a_named_region_of_one_never_keeps_a_name(shm: Path) -> None:
    region = open_region(named(shm, "alone", 1))
    assert os.listdir(shm) == []
    region.close()


def test_a_region_shared_by_name_needs_an_engine_id(shm: Path) -> None:
    with pytest.raises(UsageError, match="engine_id"):
        named(shm, "", 2)


def test_a_creator_that_closes_early_takes_the_names_away(shm: Path) -> None:
    open_region(named(shm, "early", 3)).close()
    assert os.listdir(shm) == []


@pytest.mark.parametrize(
    "other",
    [
        {"num_rows": 17},
        {"num_rows": 15},
        {"namespace_digest": b"m" * 16},
        {"geometry": geometry(factor=1)},
        {"geometry": geometry(world_size=4, factor=1)},
    ],
)
def test_a_live_region_of_another_geometry_is_refused_and_left_alone(shm: Path, other: dict[str, object]) -> None:
    owner = open_region(named(shm, "e", 2, 0))
    before = sorted(os.listdir(shm))
    with pytest.raises(RegionError):
        open_region(named(shm, "e", 2, 1, **other))
    assert sorted(os.listdir(shm)) == before
    open_region(named(shm, "e", 2, 1)).close()
    owner.close()


def test_a_live_region_whose_header_is_wrong_is_refused(shm: Path) -> None:
    owner = open_region(named(shm, "e", 2, 0))
    control = next(shm.glob("*.control"))
    good = control.read_bytes()
    for position in range(0, 88, 8):  # magic, version, sizes, counts, digest: each word of the identity
        with control.open("r+b") as file:
            file.seek(position)
            file.write(bytes(byte ^ 0x5A for byte in good[position : position + 8]))
        with pytest.raises(RegionError, match=r"the region('s| was)"):
            open_region(named(shm, "e", 2, 1, deadline_seconds=5))
        with control.open("r+b") as file:
            file.write(good[:88])
    open_region(named(shm, "e", 2, 1)).close()
    owner.close()


def test_the_same_participant_cannot_map_twice(shm: Path) -> None:
    owner = open_region(named(shm, "e", 2, 0))
    with pytest.raises(RegionError, match="already"):
        open_region(named(shm, "e", 2, 0))
    owner.close()


STALE = {"empty": b"", "short": b"kvtierR\0", "wrong magic": b"x" * 65536, "zeros": bytes(65536)}


@pytest.mark.parametrize("content", STALE.values(), ids=STALE.keys())
def test_a_leftover_without_a_live_lock_is_swept_whatever_it_holds(shm: Path, content: bytes) -> None:
    names = Names.of(str(shm), "e")
    for path in (names.control, names.rows):
        Path(path).write_bytes(content)
        os.chmod(path, 0o600)
    region = open_region(named(shm, "e", 2))
    assert os.stat(names.rows).st_size == region.spec.size_bytes
    assert not region.view.any()
    region.close()
    assert os.listdir(shm) == []


def test_a_perfect_copy_of_a_region_without_its_lock_is_not_adopted(shm: Path) -> None:
    owner = open_region(named(shm, "e", 2, 0))
    owner.view[:] = 66
    copies = {path: path.read_bytes() for path in shm.iterdir()}
    incarnation = owner.incarnation
    owner.close()
    for path, content in copies.items():
        path.write_bytes(content)
        path.chmod(0o600)
    region = open_region(named(shm, "e", 2, 1))
    assert region.incarnation != incarnation
    assert not region.view.any()
    region.close()


def plant_symlink(path: Path) -> None:
    target = path.with_name("target")
    target.write_bytes(b"precious")
    target.chmod(0o600)
    path.symlink_to(target)


def plant_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as end:
        end.bind(str(path))


def plant_world_readable(path: Path) -> None:
    path.write_bytes(b"x" * 4096)
    path.chmod(0o644)


HOSTILE = {
    "symlink": plant_symlink,
    "fifo": lambda path: os.mkfifo(path, 0o600),
    "directory": lambda path: path.mkdir(0o700),
    "socket": plant_socket,
    "mode": plant_world_readable,
}


@pytest.mark.parametrize("plant", HOSTILE.values(), ids=HOSTILE.keys())
def test_what_is_foreign_is_neither_used_nor_removed(shm: Path, plant) -> None:
    path = Path(Names.of(str(shm), "e").control)
    plant(path)
    before = {item: os.lstat(item).st_ino for item in shm.iterdir()}
    with pytest.raises(RegionError, match="not used and not removed"):
        open_region(named(shm, "e", 2))
    assert {item: os.lstat(item).st_ino for item in shm.iterdir()} == before
    for item in shm.glob("target"):
        assert item.read_bytes() == b"precious"


@pytest.mark.parametrize(
    "plant", [plant_symlink, HOSTILE["fifo"], HOSTILE["directory"]], ids=["symlink", "fifo", "dir"]
)
def test_something_foreign_in_the_rows_place_is_a_typed_error_that_leaves_no_claim(shm: Path, plant) -> None:
    names = Names.of(str(shm), "e")
    plant(Path(names.rows))
    with pytest.raises(RegionError, match="in the way"):
        open_region(named(shm, "e", 2))
    assert not Path(names.control).exists()
    assert os.path.lexists(names.rows)


def test_rows_swapped_for_another_file_are_not_mapped(shm: Path) -> None:
    owner = open_region(named(shm, "e", 2, 0))
    rows = Path(Names.of(str(shm), "e").rows)
    rows.unlink()
    rows.write_bytes(bytes(owner.spec.size_bytes))
    rows.chmod(0o600)
    with pytest.raises(RegionError, match="not the file the region was created with"):
        open_region(named(shm, "e", 2, 1))
    owner.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="giving a file to another user needs root")
def test_a_file_of_another_user_is_refused(shm: Path) -> None:
    path = Path(Names.of(str(shm), "e").control)
    path.write_bytes(bytes(4096))
    path.chmod(0o600)
    os.chown(path, 65534, 65534)
    with pytest.raises(RegionError, match="belongs to user 65534"):
        open_region(named(shm, "e", 2))
    assert path.exists()


def test_a_missing_directory_is_a_typed_error(shm: Path) -> None:
    with pytest.raises(RegionError, match="cannot create shared memory"):
        open_region(named(shm / "nowhere", "e", 2))


def test_opening_can_be_given_up(shm: Path) -> None:
    host = RegionHost()
    host.stop.set()
    with pytest.raises(RegionError, match="given up"):
        open_region(named(shm, "e", 2), host)
    assert os.listdir(shm) == []


# ---- names that change hands at a bad moment


def patience() -> Patience:
    return Patience(time.monotonic, time.monotonic() + 5, threading.Event())


def test_a_late_sweeper_does_not_take_a_successors_name_away(shm: Path) -> None:
    names = Names.of(str(shm), "e")
    Path(names.control).write_bytes(b"left by the dead")
    Path(names.control).chmod(0o600)
    late = open_claim(names)
    assert late is not None
    assert not late.alive()
    successor = open_region(named(shm, "e", 2))
    before = sorted(os.listdir(shm))
    late.sweep(patience())
    late.withdraw()
    assert sorted(os.listdir(shm)) == before
    successor.close()


def test_no_process_sweeps_a_live_region(shm: Path) -> None:
    owner = open_region(named(shm, "e", 2))
    claim = open_claim(Names.of(str(shm), "e"))
    assert claim is not None
    claim.sweep(patience())
    claim.close()
    sweep_leftovers(str(shm), patience())
    open_region(named(shm, "another", 2)).close()
    assert len(os.listdir(shm)) == 2
    owner.close()


def test_a_creator_that_leaves_while_a_joiner_waits_at_the_gate_makes_the_joiner_start_over(shm: Path) -> None:
    creator = open_region(named(shm, "e", 2, 0))
    holder = open_claim(Names.of(str(shm), "e"))
    assert holder is not None
    incarnation = creator.incarnation
    with ExitStack() as gate:
        gate.enter_context(holder.gate(patience()))

        def clock() -> float:
            """The second look at the clock is the joiner's, waiting at the gate: the creator leaves now."""
            if next(looks) == 1:
                gate.close()
                creator.close()
            return time.monotonic()

        looks = itertools.count()
        region = open_region(named(shm, "e", 2, 1), RegionHost(clock=clock))
        assert next(looks) > 2
    assert region.incarnation != incarnation
    assert region.participants_mapped == (1,)
    holder.close()
    region.close()
    assert os.listdir(shm) == []

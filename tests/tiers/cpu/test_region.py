"""The shared region: exact places, exact sizes, and only the right file is ever mapped."""

from __future__ import annotations

import errno
import mmap
import os
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from support_region import geometry

from faults.machine.belongings import private_regions
from kvtier.errors import GeometryError, RegionError, UsageError
from kvtier.tier.contract import TierContext
from kvtier.types.arrays import int_array
from kvtier.types.geometry import Geometry, GroupLayout, KVLayout, TensorRef
from kvtier.types.namespace import Namespace
from kvtier_cpu import CPUBackend, CPUOptions, RegionSpec, Sharing, open_region
from kvtier_cpu.region import populate
from kvtier_cpu.region.opening import RegionHost, attach_region
from kvtier_cpu.region.shared_region import HEADER


def anonymous(**more: object) -> RegionSpec:
    return RegionSpec(**{"geometry": geometry(), "num_rows": 16, "namespace_digest": b"n" * 16, **more})


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


def test_rows_that_are_not_whole_pages_are_refused() -> None:
    layout = KVLayout((GroupLayout((TensorRef(0, 1000),)),))
    with pytest.raises(GeometryError, match="whole pages"):
        anonymous(geometry=Geometry(layout, 512))


# ---- checksums


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
    for call in (
        lambda: region.row(bad),
        lambda: region.blocks(int_array([1, bad]), 10),
        lambda: region.checksum(bad),
        lambda: region.set_checksum(bad, bytes([1]) * 16),
    ):
        with pytest.raises(UsageError):
            call()
    assert {region.checksum(row) for row in range(16)} == {bytes(16)}
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
        region.checksum(0)


def test_close_gives_memory_and_descriptors_back() -> None:
    descriptors = set(os.listdir("/proc/self/fd"))
    before = private_regions()
    for spec in (anonymous(), anonymous(sharing=Sharing.PRIVATE)):
        region = open_region(spec)
        assert private_regions() == before + (spec.sharing is Sharing.PRIVATE)
        assert f"{region.view.ctypes.data:x}-" in Path("/proc/self/maps").read_text()
        region.close()
    maps = Path("/proc/self/maps").read_text()
    assert "memfd:kvtier" not in maps
    assert private_regions() == before
    assert set(os.listdir("/proc/self/fd")) <= descriptors


# ---- memory of one process


def test_private_memory_holds_rows_for_this_process_and_zeros_for_a_forked_child() -> None:
    region = open_region(anonymous(sharing=Sharing.PRIVATE))
    region.view[:] = 7
    region.set_checksum(3, bytes([5]) * 16)
    child = os.fork()
    if not child:
        empty = not region.view.any() and region.checksum(3) == bytes(16)
        region.view[:] = 9
        os._exit(0 if empty else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert (region.view == 7).all()
    assert region.checksum(3) == bytes([5]) * 16
    assert region.view.ctypes.data % mmap.PAGESIZE == 0
    with pytest.raises(UsageError, match="memfd"):
        _ = region.descriptors
    region.close()


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
    (2, {}, True, Sharing.PRIVATE),
    (1, {"shared": "named", "join_timeout_seconds": 3.5}, True, Sharing.MEMFD),  # as earlier releases wrote it
])  # fmt: skip
async def test_one_process_alone_gets_private_memory_where_that_has_huge_pages(
    monkeypatch: pytest.MonkeyPatch, world_size: int, options: dict[str, object], kernel: bool, expected: Sharing
) -> None:
    monkeypatch.setattr("kvtier_cpu.backend.private_works", lambda: kernel)
    layout = geometry(world_size)
    tier = CPUBackend(CPUOptions(cpu_bytes_to_use=4 * layout.row_bytes, **options))
    opened = await tier.open(TierContext("cpu", layout, Namespace(layout.layout), time.monotonic))
    assert tier.rows.spec.sharing is expected
    assert opened.mode.startswith(expected)
    await tier.close()


# ---- descriptors passed on


def test_a_memfd_region_is_shared_by_its_descriptors() -> None:
    owner = open_region(anonymous())
    peer = attach_region(anonymous(), *owner.descriptors)
    owner.view[1] = 5
    owner.set_checksum(1, bytes([7]) * 16)
    assert (peer.view[1] == 5).all()
    assert peer.checksum(1) == bytes([7]) * 16
    peer.close()
    owner.close()


@pytest.mark.parametrize("other", [{"num_rows": 15}, {"namespace_digest": b"m" * 16}, {"geometry": geometry(factor=1)}])
def test_descriptors_of_another_region_are_refused(other: dict[str, object]) -> None:
    owner = open_region(anonymous())
    with pytest.raises(RegionError):
        attach_region(anonymous(**other), *owner.descriptors)
    owner.close()


def test_a_region_whose_header_is_wrong_is_refused() -> None:
    owner = open_region(anonymous())
    control = owner.maps[1]
    good = control[: HEADER.itemsize]
    for position in range(0, HEADER.itemsize, 8):  # magic, version, sizes, digest, ready: each word
        control[position : position + 8] = bytes(byte ^ 0x5A for byte in good[position : position + 8])
        with pytest.raises(RegionError, match=r"the region('s| was| is)"):
            attach_region(anonymous(), *owner.descriptors)
        control[: len(good)] = good
    attach_region(anonymous(), *owner.descriptors).close()
    owner.close()


def test_opening_can_be_given_up() -> None:
    host = RegionHost()
    host.stop.set()
    for sharing in Sharing:
        with pytest.raises(RegionError, match="given up"):
            open_region(anonymous(sharing=sharing), host)


def test_descriptors_that_could_shrink_under_us_are_refused() -> None:
    spec = anonymous()
    loose = [os.memfd_create("loose", os.MFD_ALLOW_SEALING) for _ in range(2)]
    for fd, size in zip(loose, (spec.size_bytes, spec.control_bytes), strict=True):
        os.ftruncate(fd, size)
    with pytest.raises(RegionError):
        attach_region(spec, *loose)
    for fd in loose:
        os.close(fd)

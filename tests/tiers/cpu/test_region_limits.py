"""Memory is counted before it is touched, reserved before it is used, and given back when something fails."""

from __future__ import annotations

import mmap
import os
import re
import threading
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from support_region import geometry

from kvtier.errors import SharedMemoryError
from kvtier.tier.memory_limits import Reading, SystemLimits, require
from kvtier.tier.registry import DryRun
from kvtier_cpu import RegionSpec, Sharing, open_region
from kvtier_cpu.backend import CPUBackend, CPUOptions
from kvtier_cpu.dry_run import dry_run
from kvtier_cpu.region import opening
from kvtier_cpu.region import populate as populate_module
from kvtier_cpu.region.opening import RegionHost, attach_region
from kvtier_cpu.region.populate import make_resident
from kvtier_cpu.region.shared_region import Populated

MIB = 1 << 20
NOTHING_READ: list[Reading] = []


@dataclass(frozen=True)
class Offers:
    """Limits that are whatever the test says."""

    found: list[Reading]

    def readings(self) -> list[Reading]:
        return self.found


def anonymous(num_rows: int = 16, **more: object) -> RegionSpec:
    return RegionSpec(geometry=geometry(), num_rows=num_rows, namespace_digest=b"n" * 16, **more)


def resident_bytes(label: str) -> int:
    """Resident bytes of the mappings whose name contains `label`."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            inside = label in line
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


# ---- too little


@pytest.mark.parametrize("sharing", list(Sharing))
def test_too_little_memory_is_a_typed_error_before_any_touch(sharing: Sharing, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, touched = anonymous(sharing=sharing), []
    monkeypatch.setattr(opening, "make_resident", touched.append)
    host = RegionHost(limits=Offers([Reading("plenty", 1 << 40), Reading("a cup", 4096)]))
    descriptors = set(os.listdir("/proc/self/fd"))
    with pytest.raises(SharedMemoryError, match="a cup offers 4096 bytes") as caught:
        open_region(spec, host)
    assert caught.value.need_bytes >= spec.size_bytes
    assert caught.value.have_bytes == 4096
    assert not touched
    assert set(os.listdir("/proc/self/fd")) <= descriptors


# ---- before it is opened

PAGES = {"nr_hugepages": 4, "free_hugepages": 3, "resv_hugepages": 1, "surplus_hugepages": 1}


@pytest.mark.parametrize(
    ("have", "total", "problem", "note"),
    [
        (1 << 40, 1 << 41, "", ""),
        (4096, 1 << 41, "", "needs 64.12 MiB; a cup: 4 KiB now"),
        (4096, None, "", "needs 64.12 MiB; a cup: 4 KiB now"),
        (4096, 8192, "cpu_bytes_to_use: needs 64.12 MiB; a cup: 8 KiB at most", ""),
    ],
)
def test_a_dry_run_knows_what_is_never_enough_from_what_is_taken_now(
    have: int, total: int | None, problem: str, note: str
) -> None:
    offers = Offers([Reading("plenty", 1 << 40, 1 << 41), Reading("a cup", have, total)])
    tier = CPUBackend(CPUOptions(cpu_bytes_to_use=64 << 20), RegionHost(offers))
    found = tier.dry_run(geometry(), True)
    assert [str(each) for each in found.problems] == ([problem] if problem else [])
    assert found.notes == ((note,) if note else ())
    assert tier.dry_run(geometry(), False) == DryRun()


@pytest.mark.parametrize(
    ("pages", "problem", "note"),
    [
        ({}, "at most", ""),
        (PAGES, "8 MiB at most", ""),
        (PAGES | {"nr_overcommit_hugepages": 2}, "", "6 MiB now"),
        (PAGES | {"nr_overcommit_hugepages": 4}, "", ""),
    ],
)
def test_a_dry_run_counts_the_pages_that_were_set_aside(
    tmp_path: Path, pages: dict[str, int], problem: str, note: str
) -> None:
    for name, count in pages.items():
        (tmp_path / name).write_text(f"{count}\n")
    shape = geometry()
    spec = RegionSpec(shape, (10 << 20) // shape.row_bytes, b"", reserved=True)
    found = dry_run(spec, Offers(NOTHING_READ), tmp_path)
    for shown, expected in ((found.problems, problem), (found.notes, note)):
        assert [str(each).endswith(expected) for each in shown] == [True] * bool(expected)
        assert all("vm.nr_hugepages" in str(each) for each in shown)


# ---- reading the limits


def system(tmp_path: Path, cgroup: str, mountinfo: str, meminfo: str = "MemAvailable: 1000 kB\n") -> SystemLimits:
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "meminfo").write_text(meminfo)
    (tmp_path / "proc" / "self" / "cgroup").write_text(cgroup)
    (tmp_path / "proc" / "self" / "mountinfo").write_text(mountinfo)
    return SystemLimits(tmp_path / "proc")


def group(path: Path, **files: object) -> None:
    path.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (path / f"memory.{name}").write_text(f"{value}\n")


def have(limits: SystemLimits) -> dict[str, int]:
    return {reading.where.rpartition("/")[2]: reading.have_bytes for reading in limits.readings()}


def test_mem_available_counts(tmp_path: Path) -> None:
    assert have(system(tmp_path, "", "")) == {"MemAvailable": 1_024_000}


def test_a_reading_knows_what_there_is_in_all(tmp_path: Path) -> None:
    top = tmp_path / "cg"
    group(top, max=1000, current=400, stat="")
    meminfo = "MemTotal: 4000 kB\nMemAvailable: 1000 kB\n"
    limits = system(tmp_path, "0::/\n", f"31 23 0:28 / {top} rw - cgroup2 cgroup2 rw\n", meminfo)
    assert [reading.total_bytes for reading in limits.readings()] == [4_096_000, 1000]


def test_every_enclosing_cgroup_of_version_2_counts_less_the_file_cache_it_can_drop(tmp_path: Path) -> None:
    top = tmp_path / "cg"
    group(top / "pod" / "box", max=900, current=700, stat="anon 10\ninactive_file 300\nactive_file 5")
    group(top / "pod", max="max", high=5000, current=4000, stat="inactive_file 0")
    group(top)
    limits = system(tmp_path, "0::/pod/box\n", f"31 23 0:28 / {top} rw shared:9 - cgroup2 cgroup2 rw\n")
    assert have(limits) == {"MemAvailable": 1_024_000, "box": 500, "pod": 1000}


def test_version_1_counts_and_its_idea_of_no_limit_does_not(tmp_path: Path) -> None:
    top = tmp_path / "cg"
    group(top / "a", limit_in_bytes=800, usage_in_bytes=900, stat="inactive_file 1\ntotal_inactive_file 50")
    group(top, limit_in_bytes=9223372036854771712, usage_in_bytes=900, stat="")
    limits = system(tmp_path, "4:cpu,memory:/a\n0::/\n", f"31 23 0:28 / {top} rw - cgroup cgroup rw,cpu,memory\n")
    assert have(limits) == {"MemAvailable": 1_024_000, "a": 0}


def test_in_a_container_the_top_of_the_mount_is_its_own_cgroup(tmp_path: Path) -> None:
    top = tmp_path / "cg"
    group(top, max=1000, current=400, stat="")
    mountinfo = f"31 23 0:28 /docker/abc {top} rw - cgroup2 cgroup2 rw\n"
    for number, own in enumerate(("/docker/abc", "/", "/../other")):
        limits = system(tmp_path / str(number), f"0::{own}\n", mountinfo)
        assert have(limits) == {"MemAvailable": 1_024_000, "cg": 600}


def test_limits_that_cannot_be_read_are_no_limits(tmp_path: Path) -> None:
    limits = system(tmp_path, "nonsense\n", "more nonsense\n\n - \n", "gibberish\n")
    assert limits.readings() == []
    require(limits, 1 << 60)


def test_this_system_has_limits() -> None:
    readings = SystemLimits().readings()
    assert "MemAvailable" in {reading.where for reading in readings}
    assert all(reading.have_bytes >= 0 for reading in readings)


# ---- populating


@pytest.mark.parametrize("kernel", ["knows MADV_POPULATE_WRITE", "does not"])
@pytest.mark.parametrize("huge", [True, False])
def test_all_memory_is_resident_and_zero_afterwards(monkeypatch: pytest.MonkeyPatch, kernel: str, huge: bool) -> None:
    if kernel == "does not":
        monkeypatch.setattr(populate_module, "_kernel_takes", lambda *advices: False)
    monkeypatch.setattr(populate_module, "PIECE_BYTES", 256 * 1024)
    spec = anonymous(num_rows=301, huge_pages=huge)
    region = open_region(spec)
    assert region.populated is (Populated.TOUCHED if kernel == "does not" else Populated.POPULATE_WRITE)
    assert resident_bytes("kvtier-rows") == spec.size_bytes
    assert not region.view.any()
    region.close()


def test_without_populating_memory_is_reserved_but_not_mapped() -> None:
    spec = anonymous(num_rows=301, populate=False)
    region = open_region(spec)
    assert region.populated is Populated.SKIPPED
    assert resident_bytes("kvtier-rows") < spec.size_bytes
    assert os.fstat(region.descriptors[0]).st_blocks * 512 == spec.size_bytes
    region.close()


def test_memory_of_a_failed_population_can_be_unmapped_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(populate_module, "_madvise", lambda pages, start, length, advice: 12 if start else 0)
    monkeypatch.setattr(populate_module, "PIECE_BYTES", mmap.PAGESIZE)
    fd = os.memfd_create("rows")
    os.ftruncate(fd, 16 * mmap.PAGESIZE)
    pages = mmap.mmap(fd, 16 * mmap.PAGESIZE)
    with pytest.raises(SharedMemoryError, match="anonymous memory"):
        make_resident(fd, pages, anonymous(huge_pages=False), threading.Event())
    pages.close()  # a view kept anywhere would make this a BufferError
    os.close(fd)


def flags_of(memory: np.ndarray) -> list[str]:
    """The kernel's flags of the mapping that an array lies in."""
    address, inside = memory.ctypes.data, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if head is not None:
            inside = int(head[1], 16) <= address < int(head[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return line.split()[1:]
    raise AssertionError(f"no mapping holds address {address:#x}")


@pytest.mark.parametrize("dump_rows", [False, True])
@pytest.mark.parametrize("sharing", list(Sharing))
def test_core_dumps_leave_the_rows_out(sharing: Sharing, dump_rows: bool) -> None:
    region = open_region(anonymous(sharing=sharing, dump_rows=dump_rows))
    assert ("dd" in flags_of(region.view)) is not dump_rows
    region.close()


def test_a_region_of_passed_descriptors_is_kept_from_core_dumps_too() -> None:
    region = open_region(anonymous())
    other = attach_region(anonymous(), *region.descriptors)
    assert "dd" in flags_of(other.view)
    other.close()
    region.close()

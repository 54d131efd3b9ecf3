"""What rows in shared memory cost and risk on CUDA: registering them, huge pages, copies, and a kill within a copy.

    python -m benchmarks.cuda_rows [--gib 4] [--kills 100] [--json FILE]

Rows are a sealed memfd, as a stack process would pass them to the workers of an engine. Measured are

- `register`: seconds of `cuMemHostRegister` for each GiB, of small pages and of huge pages (`MADV_COLLAPSE` before
  registering), by one process and by two at once, and whether pages that are registered can still be collapsed;
- `copy`: GiB/s of one stretch each way, over each kind of row and over pinned memory of the driver's own;
- `kill`: a child copies patterns of its own from the device into rows without end and is killed with SIGKILL. As soon
  as its pidfd says that it has ended, another pattern is written into the rows. A byte that changes afterwards was
  written by a copy of a process that no longer exists. Such a byte is an error of the run.

It calls the driver directly (`libcuda.so.1`), so that a child begins within a second. Without a GPU it says so.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import multiprocessing
import os
import random
import select
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks.options import JSON_FILE
from benchmarks.report import ABSENT, GIB, Report, median, table

HUGE = 2 << 20
F_ADD_SEALS, SEAL_SHRINK, SEAL_GROW = 1033, 2, 4
MADV_POPULATE_WRITE, MADV_COLLAPSE = 23, 25
PORTABLE = 1
PATTERN = 0xA7
WATCH_SECONDS = 0.05
"""How long rows are compared after the end of a killed process."""
KILLED_AT_ONCE = 8
KILL_BYTES = 64 << 20
START_SECONDS = 120.0
REPETITIONS = 7

_SPAWN = multiprocessing.get_context("spawn")
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class CudaError(RuntimeError):
    """A call of the driver that was refused."""


class Driver:
    """The few calls of the CUDA driver that are needed, in the primary context of the first device."""

    def __init__(self) -> None:
        self._cuda = ctypes.CDLL("libcuda.so.1")
        context = ctypes.c_void_p()
        self.call("cuInit", 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        self.call("cuCtxSetCurrent", context)

    def call(self, name: str, *arguments: Any) -> None:
        """Raises CudaError with the driver's number."""
        if error := getattr(self._cuda, name)(*arguments):
            raise CudaError(f"{name}: CUDA error {error}")

    def allocate(self, num_bytes: int) -> int:
        """The address of memory on the device."""
        address = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(num_bytes))
        return address.value

    def host_memory(self, num_bytes: int) -> int:
        """The address of pinned memory of the driver's own."""
        address = ctypes.c_void_p()
        self.call("cuMemHostAlloc", ctypes.byref(address), ctypes.c_size_t(num_bytes), PORTABLE)
        return address.value or 0

    def register(self, address: int, num_bytes: int) -> float:
        """Seconds that registering took."""
        began = time.perf_counter()
        self.call("cuMemHostRegister_v2", ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), PORTABLE)
        return time.perf_counter() - began

    def unregister(self, address: int) -> None:
        """Let the pages go."""
        self.call("cuMemHostUnregister", ctypes.c_void_p(address))

    def fill(self, device: int, value: int, num_bytes: int) -> None:
        """Set memory of the device and wait for it."""
        self.call("cuMemsetD8_v2", ctypes.c_uint64(device), ctypes.c_ubyte(value), ctypes.c_size_t(num_bytes))
        self.wait()

    def to_rows(self, row: int, device: int, num_bytes: int) -> None:
        """Begin a copy from the device."""
        size = ctypes.c_size_t(num_bytes)
        self.call("cuMemcpyDtoHAsync_v2", ctypes.c_void_p(row), ctypes.c_uint64(device), size, None)

    def to_device(self, device: int, row: int, num_bytes: int) -> None:
        """Begin a copy to the device."""
        size = ctypes.c_size_t(num_bytes)
        self.call("cuMemcpyHtoDAsync_v2", ctypes.c_uint64(device), ctypes.c_void_p(row), size, None)

    def wait(self) -> None:
        """Wait for all that was begun."""
        self.call("cuCtxSynchronize")


class Rows:
    """A mapping of a sealed memfd at a multiple of 2 MiB. `descriptor`: that of rows which another process made."""

    def __init__(self, num_bytes: int, descriptor: int | None = None) -> None:
        self.num_bytes = num_bytes
        if descriptor is None:
            descriptor = os.memfd_create("rows", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(descriptor, num_bytes)
            fcntl.fcntl(descriptor, F_ADD_SEALS, SEAL_SHRINK | SEAL_GROW)
        self.descriptor = descriptor
        reserved = _libc.mmap(None, num_bytes + HUGE, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        self.address = (reserved + HUGE - 1) // HUGE * HUGE
        fixed = mmap.MAP_SHARED | 0x10  # MAP_FIXED, over the reservation
        if _libc.mmap(self.address, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE, fixed, descriptor, 0) != self.address:
            raise OSError(ctypes.get_errno(), "rows could not be mapped")
        self.bytes = np.ctypeslib.as_array((ctypes.c_ubyte * num_bytes).from_address(self.address))

    def advise(self, advice: int) -> float:
        """Seconds of one madvise. Raises OSError."""
        began = time.perf_counter()
        if _libc.madvise(self.address, self.num_bytes, advice):
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))
        return time.perf_counter() - began

    def populate(self, huge: bool) -> float:
        """Make the rows resident; seconds. Raises OSError where the kernel has no MADV_COLLAPSE."""
        if not huge:
            return self.advise(MADV_POPULATE_WRITE)
        began = time.perf_counter()
        self.bytes[::HUGE] = 0
        self.advise(MADV_COLLAPSE)
        return time.perf_counter() - began

    def close(self) -> None:
        """Unmap and close."""
        del self.bytes
        _libc.munmap(ctypes.c_void_p(self.address), ctypes.c_size_t(self.num_bytes))
        os.close(self.descriptor)


def open_of_parent(pid: int, descriptor: int) -> int:
    """A descriptor of another process, opened anew."""
    return os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)


def register_in_child(link: Connection, parent: int, descriptor: int, num_bytes: int) -> None:
    """Map the parent's rows, and register them when it says so."""
    driver, rows = Driver(), Rows(num_bytes, open_of_parent(parent, descriptor))
    link.send("ready")
    link.recv()
    link.send(driver.register(rows.address, num_bytes))
    link.recv()


def copy_until_killed(link: Connection, parent: int, descriptor: int, num_bytes: int) -> None:
    """Fill the parent's rows from the device without end, always with copies begun and not ended."""
    driver, rows = Driver(), Rows(num_bytes, open_of_parent(parent, descriptor))
    driver.register(rows.address, num_bytes)
    sources = [driver.allocate(num_bytes) for _ in range(2)]
    for source, value in zip(sources, (0x11, 0x22), strict=True):
        driver.fill(source, value, num_bytes)
    link.send("ready")
    while True:
        for source in sources * 4:
            driver.to_rows(rows.address, source, num_bytes)
        driver.wait()


@contextmanager
def child(target: Any, *arguments: Any) -> Iterator[tuple[SpawnProcess, Connection]]:
    """A process with a link to it, which has said that it is ready."""
    link, other = _SPAWN.Pipe()
    process = _SPAWN.Process(target=target, args=(other, os.getpid(), *arguments), daemon=True)
    process.start()
    other.close()
    try:
        if not link.poll(START_SECONDS):
            raise TimeoutError("a child did not begin")
        link.recv()
        yield process, link
    finally:
        process.kill()
        process.join()
        link.close()


def measure_registering(driver: Driver, num_bytes: int) -> Iterator[dict[str, Any]]:
    """A result for each kind of page, by one process and by two at once."""
    gib = num_bytes / GIB
    for pages in ("4 KiB", "huge"):
        rows = Rows(num_bytes)
        try:
            resident = rows.populate(pages == "huge")
            alone = driver.register(rows.address, num_bytes)
            driver.unregister(rows.address)
            with child(register_in_child, rows.descriptor, num_bytes) as (_, link), ThreadPoolExecutor(1) as pool:
                own = pool.submit(driver_register, driver, rows.address, num_bytes)
                link.send("go")
                beside, both = own.result(), link.recv()
                collapsing = "not tried" if pages == "huge" else collapse_of_pinned(rows)
                driver.unregister(rows.address)
            yield {"what": "register", "pages": pages, "resident_s_gib": resident / gib, "alone_s_gib": alone / gib} | {
                "two_processes_s_gib": [beside / gib, both / gib],
                "collapse_of_registered": collapsing,
            }
        except OSError as refusal:
            yield {"what": "register", "pages": pages, "refused": str(refusal)}
        finally:
            rows.close()


def driver_register(driver: Driver, address: int, num_bytes: int) -> float:
    """Register on a thread, whose current context has to be set first."""
    context = ctypes.c_void_p()
    driver.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
    driver.call("cuCtxSetCurrent", context)
    return driver.register(address, num_bytes)


def collapse_of_pinned(rows: Rows) -> str:
    """Whether pages that are registered can be made huge."""
    try:
        return f"done in {rows.advise(MADV_COLLAPSE) * GIB / rows.num_bytes:.2f} s/GiB"
    except OSError as refusal:
        return str(refusal)


def measure_copies(driver: Driver, num_bytes: int) -> Iterator[dict[str, Any]]:
    """One stretch each way over each kind of memory, in turns, every byte compared."""
    kinds: dict[str, Rows] = {}
    for pages in ("4 KiB", "huge"):
        kinds[pages] = rows = Rows(num_bytes)
        try:
            rows.populate(pages == "huge")
        except OSError:
            kinds.pop(pages).close()
    device, own = driver.allocate(num_bytes), driver.host_memory(num_bytes)
    own_bytes = np.ctypeslib.as_array((ctypes.c_ubyte * num_bytes).from_address(own))
    places = {"driver's own": (own, own_bytes)} | {pages: (rows.address, rows.bytes) for pages, rows in kinds.items()}
    for rows in kinds.values():
        driver.register(rows.address, num_bytes)
    found: dict[tuple[str, str], list[float]] = {}
    content = np.random.default_rng(5).integers(0, 256, num_bytes, dtype=np.uint8)
    for turn in range(-1, REPETITIONS):
        for pages, (address, view) in places.items():
            view[:] = content
            for direction, copy in (("to GPU", driver.to_device), ("to rows", driver.to_rows)):
                if direction == "to rows":
                    view[:] = 0
                began = time.perf_counter()
                copy(*((device, address) if direction == "to GPU" else (address, device)), num_bytes)
                driver.wait()
                if turn >= 0:
                    found.setdefault((pages, direction), []).append(num_bytes / GIB / (time.perf_counter() - began))
            if not np.array_equal(view, content):
                raise AssertionError(f"wrong bytes came back over {pages}")
    for (pages, direction), rates in found.items():
        yield {"what": "copy", "pages": pages, "direction": direction, "gib_s": median(rates), "all": rates}
    for rows in kinds.values():
        driver.unregister(rows.address)
        rows.close()


def kill_in_a_copy(seed: int, num_bytes: int) -> tuple[float, int]:
    """Milliseconds from SIGKILL to the end of the process, and how many bytes changed after that end."""
    rows = Rows(num_bytes)
    try:
        rows.populate(huge=False)
        with child(copy_until_killed, rows.descriptor, num_bytes) as (process, _):
            assert process.pid is not None
            ended = os.pidfd_open(process.pid)
            time.sleep(random.Random(seed).uniform(0.0, 0.05))
            began = time.perf_counter()
            os.kill(process.pid, signal.SIGKILL)
            select.select([ended], [], [])
            took = time.perf_counter() - began
            rows.bytes[:] = PATTERN
            changed, until = 0, time.perf_counter() + WATCH_SECONDS
            while time.perf_counter() < until:
                changed = max(changed, int((rows.bytes != PATTERN).sum()))
            os.close(ended)
        return took * 1e3, changed
    finally:
        rows.close()


def measure_kills(kills: int) -> dict[str, Any]:
    """Many kills, a few at once."""
    with ThreadPoolExecutor(KILLED_AT_ONCE) as pool:
        found = list(pool.map(lambda seed: kill_in_a_copy(seed, KILL_BYTES), range(kills)))
    ends = sorted(took for took, _ in found)
    return {
        "what": "kill",
        "kills": kills,
        "mib": KILL_BYTES >> 20,
        "end_ms_p50": median(ends),
        "end_ms_max": ends[-1],
        "kills_with_bytes_written_after_the_end": sum(changed > 0 for _, changed in found),
    }


@click.command()
@click.option("--gib", default=4.0, show_default=True, help="GiB that are registered.")
@click.option("--copy-mib", default=512, show_default=True, help="MiB of one copy.")
@click.option("--kills", default=100, show_default=True)
@JSON_FILE
def main(gib: float, copy_mib: int, kills: int, json_file: Path | None) -> None:
    """Measure shared rows on CUDA."""
    report = Report("cuda_rows", {"gib": gib, "copy_mib": copy_mib, "kills": kills})
    report.head()
    try:
        driver = Driver()
    except (OSError, CudaError) as refusal:
        report.notes.append(f"CUDA: {ABSENT} ({refusal})")
        report.end(json_file)
        return
    for results in (
        measure_registering(driver, int(gib * GIB) // HUGE * HUGE),
        measure_copies(driver, copy_mib << 20),
        iter([measure_kills(kills)]),
    ):
        for result in results:
            report.results.append(result)
            report.write(json_file)
    report.verified = not any(row.get("kills_with_bytes_written_after_the_end") for row in report.results)
    for row in report.results:
        table(
            str(row["what"]), list(row), [[str(value) if isinstance(value, list) else value for value in row.values()]]
        )
    report.end(json_file)
    if not report.verified:
        raise SystemExit(1)


if __name__ == "__main__":
    main()

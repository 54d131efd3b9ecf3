"""Finds the fastest path for each group by trying all of them once, when the tier opens.

A trial copies pages with the fragments of a group, scattered, between memory of its own on the device and pinned
memory of its own, so it touches nothing of the engine's. Every byte is compared: a path that fails or brings a wrong
byte is not used.
"""

from __future__ import annotations

import logging
import mmap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch

from kvtier.aio.daemon_pool import DaemonPool
from kvtier.types.arrays import distinct, int_array
from kvtier_gpu.copy_plan import CopyPlan, GroupPages, GroupTable
from kvtier_gpu.engines.batch_copy import BatchCopy
from kvtier_gpu.engines.contract import Bytes, Direction
from kvtier_gpu.engines.copy_lane import CopyLane, CopySides
from kvtier_gpu.engines.copy_paths import CopyPath, path_by_rule
from kvtier_gpu.engines.device import DeviceStream
from kvtier_gpu.engines.group_tensors import GroupTensors, tensors_of_group
from kvtier_gpu.engines.pinned_region import PinnedRegion, RowSlices
from kvtier_gpu.engines.plan_copier import PlanCopier
from kvtier_gpu.kv_tensors import KVTensor

TRIAL_BYTES = 8 << 20
TRIAL_FRAGMENTS = 4096
TRIAL_BYTES_MAX = 32 << 20
"""Groups with longer pages than this are not tried."""
TRIAL_SECONDS = 1.0
"""No run begins later than this after the first, over all groups."""
HANG_SECONDS = 10.0
"""How long opening waits for all trials."""
TIMED_RUNS = 3
GIB = 1 << 30

_log = logging.getLogger(__name__)

GroupPaths = dict[Direction, CopyPath]


@dataclass(frozen=True, slots=True)
class ChosenPaths:
    """The path of each group in each direction. `batch`: the driver's call works. `notes` say what does not."""

    paths: dict[Direction, tuple[CopyPath, ...]]
    batch: bool
    notes: tuple[str, ...]


def choose_paths(sides: CopySides, wanted: CopyPath | None, clock: Callable[[], float], *, pinned: bool) -> ChosenPaths:
    """The fastest path for each group; by rule where none can be tried, as for rows that are not pinned.

    With `wanted` that path is taken wherever it works. All is tried on a thread of its own. One that hangs is left
    behind with its memory, which copies may still reach, and the driver's call is not used.
    """
    pool = DaemonPool("kvtier-gpu-trial", 1)
    try:
        trial = pool.submit(_tried_on_device, sides, wanted, clock, pinned)
        pool.shutdown()  # the thread ends with its call
        return trial.result(HANG_SECONDS)
    except OSError as refusal:
        why = f"they did not end within {HANG_SECONDS:g} s" if isinstance(refusal, TimeoutError) else refusal
        untried = _tried(replace(sides, batch=None), wanted, clock, pinned=False)
        return replace(untried, notes=(f"the ways to copy could not be tried: {why}",))


def _tried_on_device(
    sides: CopySides, wanted: CopyPath | None, clock: Callable[[], float], pinned: bool
) -> ChosenPaths:
    """On a thread whose current device may be another one."""
    with sides.device.entered(sides.device.current_stream()):
        return _tried(sides, wanted, clock, pinned)


def _tried(sides: CopySides, wanted: CopyPath | None, clock: Callable[[], float], pinned: bool) -> ChosenPaths:
    trials = _PathTrials(sides, wanted, _Timer(clock, clock() + TRIAL_SECONDS))
    if sides.batch is not None:
        trials.check_batch()
    found: dict[tuple[int, ...], GroupPaths] = {}
    for group in sides.groups:
        fragments = tuple(group.table.lengths.tolist())
        if pinned and wanted is None and fragments not in found:
            found[fragments] = trials.fastest(group.table)
    chosen = [trials.paths(group.table, found.get(tuple(group.table.lengths.tolist()), {})) for group in sides.groups]
    paths = {direction: tuple(one[direction] for one in chosen) for direction in Direction}
    return ChosenPaths(paths, trials.sides.batch is not None, tuple(dict.fromkeys(trials.notes)))


@dataclass(frozen=True, slots=True)
class _Timer:
    """The clock of the trials and the time from which no run begins any more."""

    clock: Callable[[], float]
    until: float

    def in_time(self) -> bool:
        return self.clock() < self.until


class _PathTrials:
    """The trials of one opening. The driver's call is in `sides` as long as it has not failed."""

    def __init__(self, sides: CopySides, wanted: CopyPath | None, timer: _Timer) -> None:
        self.sides = sides
        self._wanted = wanted
        self._timer = timer
        self.notes: list[str] = []

    def check_batch(self) -> None:
        """Copy a few bytes by the driver's call, both ways."""
        first, lengths = int_array([0]), int_array([64])
        table = GroupTable(0, first, lengths, lengths, first, 64, 0, 1)
        try:
            with _scratch(self.sides, table, 4) as trial:
                for direction in Direction:
                    trial.check(PlanCopier(trial.lane(direction, self.sides.batch), [CopyPath.BATCH], 0), direction)
        except Exception as refusal:
            self._failed(CopyPath.BATCH, refusal)

    def paths(self, table: GroupTable, found: GroupPaths) -> GroupPaths:
        """The paths of a group: wanted, found, or by rule."""
        wanted = dict.fromkeys(Direction, self._wanted) if self._wanted is not None else found
        batch = self.sides.batch is not None
        usable = {direction: path for direction, path in wanted.items() if batch or path is not CopyPath.BATCH}
        return {direction: path_by_rule(table, direction, batch=batch) for direction in Direction} | usable

    def fastest(self, table: GroupTable) -> GroupPaths:
        """The fastest paths of a group, as far as there is time and memory to try."""
        found: GroupPaths = {}
        if table.page_bytes > TRIAL_BYTES_MAX or not self._timer.in_time():
            return found
        fragments = max(1, TRIAL_FRAGMENTS // len(table.lengths))
        try:
            with _scratch(self.sides, table, min(fragments, max(1, TRIAL_BYTES // table.page_bytes))) as trial:
                for direction in Direction:
                    found |= self._fastest_of(trial, direction)
        except Exception as refusal:
            self.notes.append(f"not all ways to copy could be tried: {refusal}")
        return found

    def _fastest_of(self, trial: _PathTrial, direction: Direction) -> GroupPaths:
        seconds: dict[CopyPath, float] = {}
        for path in CopyPath:
            if path is CopyPath.BATCH and self.sides.batch is None:
                continue
            try:
                copier = PlanCopier(trial.lane(direction, self.sides.batch), [path], trial.plan.nbytes)
                trial.check(copier, direction)
                took = trial.shortest(copier, self._timer)
            except Exception as refusal:
                self._failed(path, refusal)
            else:
                seconds |= {path: took} if took is not None else {}
        if not seconds:
            return {}
        rates = ", ".join(f"{path} {trial.plan.nbytes / took / GIB:.1f} GiB/s" for path, took in seconds.items())
        _log.info("copies %s of pages in fragments of %s bytes: %s", direction, trial.fragments, rates)
        return {direction: min(seconds, key=seconds.__getitem__)}

    def _failed(self, path: CopyPath, refusal: Exception) -> None:
        """A path was tried in vain. The driver's call, which gathering needs as well, is not used at all if it failed;
        others may only have lacked memory."""
        batch = self.sides.batch
        if path is CopyPath.BATCH or (batch is not None and batch.last_error):
            self.sides = replace(self.sides, batch=None)
        self.notes.append(f"copies by {path} failed when they were tried: {refusal}")


@dataclass(frozen=True, slots=True, eq=False)
class _PathTrial:
    """Pages in scratch memory, which begin on the device as `tensors` and in the region as `rows`."""

    sides: CopySides
    plan: CopyPlan
    stream: DeviceStream
    on_device: torch.Tensor
    tensors: Bytes
    rows: Bytes

    @property
    def fragments(self) -> str:
        lengths = self.plan.groups[0].table.lengths
        return " to ".join(map(str, dict.fromkeys((int(lengths.min()), int(lengths.max())))))

    def lane(self, direction: Direction, batch: BatchCopy | None) -> CopyLane:
        return CopyLane(replace(self.sides, batch=batch), self.stream, direction)

    def check(self, copier: PlanCopier, direction: Direction) -> None:
        """Run once and compare every byte. Raises what the device refuses, and RuntimeError for wrong bytes."""
        self._fill(direction)
        self.run(copier)
        there = self.on_device.cpu().numpy()
        if not np.array_equal(there, self.tensors) or not np.array_equal(self.sides.region, self.rows):
            raise RuntimeError("wrong bytes arrived")

    def shortest(self, copier: PlanCopier, timer: _Timer) -> float | None:
        """Seconds of the shortest of a few runs; None if there was no time for one."""
        found: list[float] = []
        while timer.in_time() and len(found) < TIMED_RUNS:
            began = timer.clock()
            self.run(copier)
            found.append(max(timer.clock() - began, 1e-9))  # no clock is so coarse that a copy takes no time
        return min(found, default=None)

    def run(self, copier: PlanCopier) -> None:
        """Copy all pages and wait for the end. Raises what the device refuses, the driver's call alone as well."""
        failures = copier.issue(self.plan)
        ended = self.sides.device.new_event(blocking=False)
        ended.record(self.stream)
        ended.synchronize()
        for failure in failures:
            raise failure.error
        if error := copier.driver_error:
            raise RuntimeError(f"cuMemcpyBatchAsync: CUDA error {error}")

    def _fill(self, direction: Direction) -> None:
        """The bytes on the side that is read, zeros on the other."""
        to_rows = direction is Direction.TO_ROWS
        self.sides.region[:] = 0 if to_rows else self.rows
        self.on_device.copy_(torch.from_numpy(self.tensors if to_rows else np.zeros_like(self.tensors)))


@contextmanager
def _scratch(sides: CopySides, table: GroupTable, pages: int) -> Iterator[_PathTrial]:
    """So many pages like those of a group. No two of them follow each other on the device as they do in a row."""
    device, nbytes, row_bytes = sides.device, pages * table.page_bytes, sides.pages_per_row * table.page_bytes
    region, rows = np.frombuffer(mmap.mmap(-1, nbytes), np.uint8), RowSlices(row_bytes, [(0, row_bytes)])
    pinned = PinnedRegion(device.runtime(), region, rows)
    stream = device.new_stream(urgent=False)
    if error := pinned.pin():
        raise RuntimeError(f"scratch memory could not be pinned (CUDA error {error})")
    try:
        with device.entered(stream):
            on_device = device.empty(nbytes)
            group = _scratch_group(table, on_device, pages)
            tensors = (np.arange(nbytes, dtype=np.uint32) * 2654435761 >> 17).astype(np.uint8)
            order = np.arange(pages, dtype=np.int64)
            moved = GroupPages(group.table, order[::-1], order * table.page_bytes)
            trial = _PathTrial(
                replace(sides, groups=(group,), region=region, rows=rows),
                CopyPlan((moved,), distinct(order // sides.pages_per_row), nbytes, row_bytes),
                stream,
                on_device,
                tensors,
                _in_rows(tensors, group.table, on_device.data_ptr()),
            )
            try:
                yield trial
            finally:
                stream.synchronize()  # a run that failed may have begun copies
    finally:
        pinned.unpin()


def _scratch_group(table: GroupTable, on_device: torch.Tensor, pages: int) -> GroupTensors:
    """A group with the fragments of another, whose tensors lie one after another on the device, the last one first."""
    lengths = table.lengths
    starts = (np.cumsum(lengths[::-1])[::-1] - lengths) * pages
    addresses = starts + on_device.data_ptr()
    scratch = replace(table, group=0, addresses=addresses, strides=lengths, worker_offset=0, num_blocks=pages)
    places = zip(addresses.tolist(), lengths.tolist(), strict=True)
    return tensors_of_group(scratch, [KVTensor(on_device, at, length, length, pages) for at, length in places])


def _in_rows(tensors: Bytes, table: GroupTable, address: int) -> Bytes:
    """The bytes of scratch tensors as their pages lie in rows, the last page first."""
    rows = np.empty((table.num_blocks, table.page_bytes), dtype=np.uint8)
    for at, offset, length in zip(table.addresses - address, table.offsets, table.lengths, strict=True):
        pages = tensors[at : at + table.num_blocks * length].reshape(-1, length)
        rows[:, offset : offset + length] = pages[::-1]
    return rows.reshape(-1)

"""Jobs of an engine: of whole blocks, their checks, and those that do not end in time."""

from __future__ import annotations

import math
from collections.abc import Sequence, Sized
from operator import methodcaller

import numpy as np

from kvtier.control.settings import StackSettings
from kvtier.errors import UsageError
from kvtier.types.checks import check_keys, check_number, check_timeout, check_types, check_whole, outside
from kvtier.types.geometry import Geometry
from kvtier.types.gpu_runs import GPURuns
from kvtier.types.jobs import GPUGroup, JobKind, TransferJob
from kvtier.types.keys import GROUP_BYTES, JobId, OffloadKey, key_group

GRACE_SECONDS = 1.0
"""How long after its deadline a job may take to end, and copies that were in flight then to be recorded."""

BlockGroup = tuple[Sequence[OffloadKey], Sequence[int]]
"""Keys of one KV cache group, and their GPU blocks: `block_size_factor` consecutive ids for each key."""


def whole_groups(
    keys: Sequence[OffloadKey], gpu_blocks: Sequence[int], groups: Sequence[BlockGroup], geometry: Geometry
) -> list[GPUGroup]:
    """The groups of a job for whole blocks. Raises UsageError for blocks that contradict the layout."""
    check_types("a job", (keys, Sized), (gpu_blocks, Sized), (groups, Sized))
    if not len(groups):
        check_keys(keys, geometry.num_groups)
        groups = [(keys, gpu_blocks)]
    elif len(keys) or len(gpu_blocks):
        raise UsageError("blocks are named by keys and gpu_blocks or by groups, not by both")
    else:
        check_pairs(groups, geometry.num_groups)
    factor = geometry.factor
    found = []
    for group_keys, blocks in groups:
        if len(blocks) != len(group_keys) * factor:
            raise UsageError(f"{len(group_keys)} keys of {factor} GPU blocks each, but {len(blocks)} GPU blocks")
        if group_keys:
            found.append(GPUGroup(key_group(group_keys[0]), tuple(group_keys), GPURuns.whole(blocks, factor)))
    return found


def new_job(
    number: int,
    kind: JobKind,
    groups: Sequence[GPUGroup],
    timeout_seconds: float | None,
    settings: StackSettings,
    now: float,
) -> TransferJob:
    """A job with this number as its id and a deadline from `now`; the default of `settings` when no timeout is given.

    Raises UsageError for what is no kind, no groups or no time.
    """
    if type(kind) is not JobKind or type(groups) not in (tuple, list):
        check_types("a job", (kind, JobKind), (groups, tuple | list))
    if timeout_seconds is not None:
        check_timeout(timeout_seconds)
    else:
        loads = kind is JobKind.LOAD
        timeout_seconds = settings.load_timeout_seconds if loads else settings.store_timeout_seconds
    return TransferJob(JobId(number), kind, tuple(groups), now + timeout_seconds)


def check_job(job: TransferJob, geometry: Geometry) -> None:
    """Raise UsageError for a job that names groups, blocks or sub-blocks that do not exist.

    Nothing below checks that again, but the bounds of memory and disks: a GPU block beyond the tensors fails its job.
    """
    if type(job) is not TransferJob or type(job.kind) is not JobKind or type(job.groups) is not tuple:
        check_types("a job", (job, TransferJob))
        check_types("a job", (job.kind, JobKind), (job.groups, tuple | list))
    if type(job.job_id) is not int or job.job_id < 0:
        check_whole("a job's id", job.job_id)
    if job.deadline is not None and not (type(job.deadline) is float and math.isfinite(job.deadline)):
        check_number("the deadline of a job", job.deadline)
    for group in job.gpu_groups:
        _check_group(group, geometry)


def check_pairs(groups: object, num_groups: int) -> None:
    """Raise UsageError unless these are pairs: keys of one group, and the numbers of their GPU blocks."""
    check_types("the groups of a job", (groups, tuple | list))
    for pair in groups:  # type: ignore[attr-defined]  # checked just now
        check_types("a group of a job", (pair, tuple | list))
        if len(pair) != 2:
            raise UsageError("a group of a job is a pair: keys, and their GPU blocks")
        check_keys(pair[0], num_groups)
        check_types("the GPU blocks of a group", (pair[1], Sized))


def _check_group(group: GPUGroup, geometry: Geometry) -> None:
    runs = group.runs
    if type(group.group) is not int or type(group.keys) is not tuple or type(runs) is not GPURuns:
        check_types("a GPUGroup", (group.group, int), (group.keys, tuple | list), (runs, GPURuns))
    for ids in (runs.blocks, runs.firsts, runs.counts, runs.gpu_blocks):
        if type(ids) is not np.ndarray or ids.dtype != np.int64 or ids.ndim != 1:
            raise UsageError("the numbers of GPURuns are one-dimensional arrays of int64")
    if not 0 <= group.group < geometry.num_groups:
        raise UsageError(f"there is no group {group.group} among {geometry.num_groups}")
    suffix = group.group.to_bytes(GROUP_BYTES, "big")
    if not {bytes}.issuperset(map(type, group.keys)):
        check_keys(group.keys, geometry.num_groups)
    if not all(map(methodcaller("endswith", suffix), group.keys)):
        raise UsageError(f"group {group.group}: it names a key of another group")
    if outside(runs.gpu_blocks, 1 << 62) is not None:
        raise UsageError(f"group {group.group}: a run names a negative GPU block")
    if runs.all_whole(len(group.keys), geometry.factor):
        return
    for what, values, most in (
        ("offloaded block", runs.blocks, len(group.keys) - 1),
        ("first sub-block", runs.firsts, geometry.factor),
        ("number of sub-blocks", runs.counts, geometry.factor),
        ("end of a run", runs.firsts + runs.counts, geometry.factor),
    ):
        wrong = outside(values, most + 1)
        if wrong is not None:
            raise UsageError(f"group {group.group}: {what} {wrong} is outside 0..{most}")


class OverdueJobs:
    """Jobs that have not ended by their deadline, from one look to the next.

    Such a job may wait for a copy that was in flight at the first look: then for its end, and one look more, because
    that end may be on its way.
    """

    def __init__(self) -> None:
        self._jobs: set[JobId] = set()
        self._copies: set[JobId] = set()

    def forget(self, job_id: JobId) -> None:
        """A job that has this id is another one from here on."""
        self._jobs.discard(job_id)

    def are_lost(self, overdue: set[JobId], copies: set[JobId]) -> bool:
        """True if one of these jobs waits for no copy any more. `copies` are those in flight."""
        if self._jobs.isdisjoint(overdue):  # none of those before: these may wait for any copy
            self._jobs, self._copies = overdue, copies
            return False
        if self._copies:
            self._jobs, self._copies = self._jobs & overdue, self._copies & copies
            return False
        return True

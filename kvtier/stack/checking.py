"""Whether an engine's job makes sense in a layout, before anything of it is begun."""

from __future__ import annotations

from kvtier.errors import UsageError
from kvtier.geometry import Geometry
from kvtier.jobs import FEW, GPURuns, GroupTransfer, IntArray, JobKind, TransferJob


def check_job(job: TransferJob, kind: JobKind, geometry: Geometry) -> None:
    """Raise UsageError for a job of another kind or one that names groups, blocks or sub-blocks that do not exist.

    GPU block ids are checked by the tier that has the tensors; a wrong one fails its job.
    """
    if job.kind is not kind:
        raise UsageError(f"a {job.kind} job was handed to {kind}")
    for group in job.groups:
        _check_group(group, geometry)


def _check_group(group: GroupTransfer, geometry: Geometry) -> None:
    runs = group.staging
    if not isinstance(runs, GPURuns):
        raise UsageError("a job for the whole stack names its GPU blocks by runs")
    if not 0 <= group.group < geometry.num_groups:
        raise UsageError(f"there is no group {group.group} among {geometry.num_groups}")
    if not len(runs.blocks):
        return
    least, most = _ends(runs.blocks)
    if least < 0 or most >= len(group.keys):
        raise UsageError(f"group {group.group}: a run names an offloaded block beyond its {len(group.keys)} keys")
    if _ends(runs.firsts)[0] < 0 or _ends(runs.counts)[0] < 0:
        raise UsageError(f"group {group.group}: a run begins before its offloaded block")
    if _ends(runs.firsts + runs.counts)[1] > geometry.factor:
        raise UsageError(f"group {group.group}: a run ends beyond the {geometry.factor} GPU blocks of its block")
    if len(runs.gpu_blocks) and _ends(runs.gpu_blocks)[0] < 0:
        raise UsageError(f"group {group.group}: a run names a negative GPU block")


def _ends(numbers: IntArray) -> tuple[int, int]:
    """(the least, the greatest); a few numbers are looked at faster in a list than in an array."""
    if len(numbers) <= FEW:
        listed = numbers.tolist()
        return min(listed), max(listed)
    return int(numbers.min()), int(numbers.max())

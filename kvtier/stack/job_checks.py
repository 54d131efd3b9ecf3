"""Whether an engine's job makes sense in a layout, before anything of it is begun."""

from __future__ import annotations

from operator import methodcaller

from kvtier.errors import UsageError
from kvtier.types.arrays import outside
from kvtier.types.geometry import Geometry
from kvtier.types.jobs import GPUGroup, TransferJob
from kvtier.types.keys import make_key


def check_job(job: TransferJob, geometry: Geometry) -> None:
    """Raise UsageError for a job that names groups, blocks or sub-blocks that do not exist.

    Nothing below checks that again, but the bounds of memory and disks: a GPU block beyond the tensors fails its job.
    """
    for group in job.gpu_groups:
        _check_group(group, geometry)


def _check_group(group: GPUGroup, geometry: Geometry) -> None:
    runs = group.runs
    if not 0 <= group.group < geometry.num_groups:
        raise UsageError(f"there is no group {group.group} among {geometry.num_groups}")
    suffix = make_key(b"", group.group)
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

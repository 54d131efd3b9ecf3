"""Messages from vLLM's scheduler to its workers: which rows, and how vLLM's block lists map onto them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from vllm.v1.kv_offload.base import GPULoadStoreSpec as VLLMBlocks
from vllm.v1.kv_offload.base import LoadStoreSpec

from kvtier.types.arrays import NO_IDS, IntArray, int_array
from kvtier.types.gpu_runs import GPURuns
from kvtier.types.jobs import GPUGroup, JobKind, TransferJob
from kvtier.types.keys import GroupIndex, JobId, OffloadKey

NULL_BLOCK = 0
NO_REPORT = -1


@dataclass
class RowsSpec(LoadStoreSpec):  # type: ignore[misc]
    """Rows of the shared region for one transfer, group after group in the order of the keys.

    `group_sizes[g]` rows belong to group position g. vLLM sends it to every worker each step, so it is an array and a
    tuple. The workers report the end of the copy to the stack process by its `number`; the rows are those of the
    session `life`.
    """

    rows: np.ndarray
    group_sizes: tuple[int, ...]
    number: int
    life: str


def rows_spec(groups: Sequence[GPUGroup], num_groups: int, named: tuple[int, str]) -> RowsSpec:
    """The rows of the groups of a placed job, which are in ascending position, and of each in the order of its keys.

    `named`: its number and the session.
    """
    sizes = [0] * num_groups
    for group in groups:
        sizes[group.group] = len(group.keys)
    rows = np.concatenate([NO_IDS, *(group.rows for group in groups)]).astype(np.int32)
    return RowsSpec(rows, tuple(sizes), *named)


def copy_job(
    job_id: int, kind: JobKind, rows: RowsSpec, blocks: VLLMBlocks, factor: int, *, urgent: bool = False
) -> TransferJob:
    """A job of the gpu tier: LOAD from GPU blocks into rows, STORE from rows into GPU blocks.

    Workers do not need keys. A job needs one for each block, so the positions in `rows` serve as keys.
    """
    groups = []
    row = block = 0
    ids = int_array(blocks.block_ids)
    for group, (num_rows, num_blocks, first) in enumerate(
        zip(rows.group_sizes, blocks.group_sizes, blocks.block_indices, strict=True)
    ):
        part = slice(row, row + num_rows)
        if num_rows:
            names = tuple(OffloadKey(place.to_bytes(4, "big")) for place in range(row, row + num_rows))
            runs = _runs(kind, ids[block : block + num_blocks], int(first) % factor, num_rows, factor)
            groups.append(GPUGroup(GroupIndex(group), names, runs, int_array(rows.rows[part])))
        row += num_rows
        block += num_blocks
    return TransferJob(JobId(job_id), kind, tuple(groups), urgent=urgent)


def _runs(kind: JobKind, ids: IntArray, head: int, num_rows: int, factor: int) -> GPURuns:
    """Contiguous GPU blocks from sub-block `head` of the first row on; null blocks are not copied.

    For a store vLLM names the first block's index and leaves null blocks out wherever they are, so there is one
    reading only if nothing is missing, or only the head of the first chunk. Else nothing is copied.
    """
    if not head and len(ids) == num_rows * factor and (ids != NULL_BLOCK).all():
        return GPURuns.whole(ids, factor)
    if kind is JobKind.LOAD and len(ids) != num_rows * factor - head:
        ids = NO_IDS
    real = np.flatnonzero(ids != NULL_BLOCK)
    blocks, firsts = np.divmod(real + head, factor)
    return GPURuns(blocks, firsts, np.ones(len(real), dtype=np.int64), ids[real])

"""What crosses from vLLM's scheduler to its workers: which rows, and how vLLM's block lists map onto them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from vllm.v1.kv_offload.base import GPULoadStoreSpec as VLLMBlocks
from vllm.v1.kv_offload.base import LoadStoreSpec

from kvtier.jobs import GPULoadStoreSpec, GPURuns, GroupTransfer, IntArray, JobKind, TransferJob, int_array
from kvtier.keys import GroupIndex, JobId, OffloadKey

NULL_BLOCK = 0


@dataclass
class RowsSpec(LoadStoreSpec):  # type: ignore[misc]
    """Rows of the shared region for one transfer, group after group in the order of the keys.

    `group_sizes[g]` rows belong to group position g; `generations` are what a store has to stamp, empty for loads.
    vLLM sends it to every worker each step, so it is three arrays and a tuple.
    """

    rows: np.ndarray
    generations: np.ndarray
    group_sizes: tuple[int, ...]


def rows_spec(job: TransferJob, order: Sequence[OffloadKey], num_groups: int) -> RowsSpec:
    """The rows of a placed job in the order in which vLLM listed the keys; groups in ascending position."""
    place: dict[OffloadKey, tuple[int, int, int]] = {}
    for transfer in job.groups:
        for key, row, generation in zip(transfer.keys, transfer.slots, transfer.generations, strict=True):
            place[key] = (transfer.group, int(row), int(generation))
    found = sorted((place[key] for key in order if key in place), key=lambda entry: entry[0])  # stable
    sizes = [0] * num_groups
    for group, _, _ in found:
        sizes[group] += 1
    stores = job.kind is JobKind.STORE
    return RowsSpec(
        np.array([row for _, row, _ in found], dtype=np.int32),
        np.array([generation for _, _, generation in found] if stores else [], dtype=np.int64),
        tuple(sizes),
    )


def store_job(job_id: int, rows: RowsSpec, blocks: VLLMBlocks, factor: int) -> TransferJob:
    """GPU blocks to rows. A group whose blocks cannot be told apart gets no runs: its rows are not stamped.

    vLLM names the first block's index and leaves null blocks out wherever they are, so only a group in which nothing
    is missing, or only the head of its first chunk, has one reading.
    """
    transfers = []
    for group, rows_of, ids, first in _groups(rows, blocks):
        head = first % factor
        start = rows_of.start
        keys = _names(rows_of)
        if len(ids) == len(keys) * factor - head and len(ids):
            runs = GPULoadStoreSpec(ids, (len(ids),), (head,)).runs(factor)[0]
        else:
            runs = GPURuns(*(int_array(()) for _ in range(4)))
        rows_ids = int_array(rows.rows[start : rows_of.stop])
        generations = int_array(rows.generations[start : rows_of.stop])
        transfers.append(GroupTransfer(GroupIndex(group), keys, runs, rows_ids, generations))
    return TransferJob(JobId(job_id), JobKind.LOAD, tuple(transfers))


def load_job(job_id: int, rows: RowsSpec, blocks: VLLMBlocks, factor: int) -> TransferJob:
    """Rows to GPU blocks: contiguous blocks from the first index on; null blocks are not written."""
    transfers = []
    for group, rows_of, ids, first in _groups(rows, blocks):
        logical = first % factor + np.arange(len(ids), dtype=np.int64)
        real = np.flatnonzero(ids != NULL_BLOCK)
        runs = GPURuns(
            int_array(logical[real] // factor),
            int_array(logical[real] % factor),
            np.ones(len(real), dtype=np.int64),
            ids[real],
        )
        keys = _names(rows_of)
        row_ids = int_array(rows.rows[rows_of.start : rows_of.stop])
        transfers.append(GroupTransfer(GroupIndex(group), keys, runs, row_ids))
    return TransferJob(JobId(job_id), JobKind.STORE, tuple(transfers))


def _groups(rows: RowsSpec, blocks: VLLMBlocks) -> list[tuple[int, range, IntArray, int]]:
    """(group position, its rows, its GPU blocks, index of the first) of the groups that take part."""
    found = []
    row = block = 0
    ids = int_array(blocks.block_ids)
    for group, (num_rows, num_blocks, first) in enumerate(
        zip(rows.group_sizes, blocks.group_sizes, blocks.block_indices, strict=True)
    ):
        if num_rows:
            found.append((group, range(row, row + num_rows), ids[block : block + num_blocks], int(first)))
        row += num_rows
        block += num_blocks
    return found


def _names(rows: range) -> tuple[OffloadKey, ...]:
    """A worker copies places and never sees keys; a job wants one for each place."""
    return tuple(OffloadKey(number.to_bytes(4, "big")) for number in rows)

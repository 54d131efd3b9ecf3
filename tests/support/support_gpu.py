"""A shared region small enough for tests, KV tensors of every shape, and copies page by page in plain Python."""

from __future__ import annotations

import itertools
import mmap
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kvtier.tier.contract import TierContext
from kvtier.types.arrays import int_array
from kvtier.types.geometry import Geometry
from kvtier.types.gpu_runs import GPURuns
from kvtier.types.jobs import GPUGroup, JobKind, TransferJob
from kvtier.types.keys import GroupIndex, JobId, OffloadKey, make_key
from kvtier.types.namespace import Namespace


class MmapRows:
    """`kvtier.tier.contract.Rows` over one mapping: anonymous, or of a file that several processes share."""

    def __init__(self, geometry: Geometry, num_rows: int, file: int = -1) -> None:
        self.num_rows, self.row_bytes = num_rows, geometry.row_bytes
        self._mapping = mmap.mmap(file, num_rows * self.row_bytes)
        self.view = np.frombuffer(self._mapping, np.uint8).reshape(num_rows, self.row_bytes)

    def checksum(self, row: int) -> bytes:
        return b""

    def set_checksum(self, row: int, digest: bytes) -> None:
        pass

    def close(self) -> None:
        """Unmap. BufferError if anyone still holds a view."""
        self.view = np.empty(0, np.uint8)
        self._mapping.close()


@dataclass
class Worker:
    """One worker's KV tensors, and the storages they are cut from, gaps between pages included."""

    tensors: list[torch.Tensor]
    storages: list[torch.Tensor]

    def bytes(self) -> list[np.ndarray]:
        return [storage.cpu().numpy().copy() for storage in self.storages]

    def holds(self, content: Sequence[np.ndarray]) -> bool:
        """True if its memory is, byte for byte, what `bytes` gave."""
        return all((have == wanted).all() for have, wanted in zip(self.bytes(), content, strict=True))

    def fill_from(self, storages: Sequence[torch.Tensor]) -> None:
        """Overwrite its memory with that of another worker, or with what was kept of its own."""
        for own, other in zip(self.storages, storages, strict=True):
            own.copy_(other)


def make_worker(
    geometry: Geometry, num_blocks: int, style: str, rng: np.random.Generator, device: str = "cpu"
) -> Worker:
    """Random KV tensors for a layout: `plain` (dense), `strided` (odd gaps between pages) or `packed` (one storage)."""
    pages: dict[int, int] = {}
    for group in geometry.layout.groups:
        for ref in group.refs:
            pages[ref.tensor] = max(pages.get(ref.tensor, 0), ref.page_size_bytes)
    sizes = [pages[index] for index in range(len(pages))]

    def storage(width: int) -> torch.Tensor:
        return torch.from_numpy(rng.integers(0, 256, (num_blocks, width), dtype=np.uint8)).to(device)

    if style == "packed":
        whole = storage(sum(sizes) + 5)
        ends = np.cumsum([3, *sizes]).tolist()
        return Worker([whole[:, a:b] for a, b in itertools.pairwise(ends)], [whole])
    gap = 7 if style == "strided" else 0
    storages = [storage(size + gap) for size in sizes]
    return Worker([one[:, gap // 2 : gap // 2 + size] for one, size in zip(storages, sizes, strict=True)], storages)


def context(geometry: Geometry, tensors: Sequence[torch.Tensor], rows: MmapRows | None, worker: int = 0) -> TierContext:
    return TierContext("gpu", geometry, Namespace(geometry.layout), time.monotonic, worker, tensors, rows)


def keys(count: int, group: int = 0) -> tuple[OffloadKey, ...]:
    return tuple(make_key(f"{index}".encode(), group) for index in range(count))


def transfer(group: int, runs: GPURuns, rows: Sequence[int], generation: int = 1) -> GPUGroup:
    return GPUGroup(
        GroupIndex(group), keys(len(rows), group), runs, int_array(rows), int_array([generation] * len(rows))
    )


def job(*groups: GPUGroup, kind: JobKind = JobKind.STORE, job_id: int = 1) -> TransferJob:
    return TransferJob(JobId(job_id), kind, groups)


def runs_of(pieces: Sequence[tuple[int, int, Sequence[int]]]) -> GPURuns:
    """GPURuns from (offloaded block, first sub-block, GPU blocks)."""
    return GPURuns(
        int_array([block for block, _, _ in pieces]),
        int_array([first for _, first, _ in pieces]),
        int_array([len(ids) for _, _, ids in pieces]),
        int_array([gpu for _, _, ids in pieces for gpu in ids]),
    )


def naive_pages(one: GPUGroup) -> list[tuple[int, int, int]]:
    """(row, sub-block, GPU block) of every page a group moves, from its runs one by one."""
    result, at = [], 0
    for block, first, count in zip(one.runs.blocks, one.runs.firsts, one.runs.counts, strict=True):
        for sub in range(count):
            result.append((int(one.rows[block]), int(first) + sub, int(one.runs.gpu_blocks[at])))
            at += 1
    return result


def naive_copy(
    geometry: Geometry,
    work: TransferJob,
    worker: int,
    tensors: Sequence[torch.Tensor],
    region: np.ndarray,
    to_gpu: bool,
) -> None:
    """What a job must do on one worker, in slices of single pages, with the arithmetic of the geometry written out."""
    for one in work.groups:
        refs = geometry.layout.groups[one.group].refs
        page = sum(ref.page_size_bytes for ref in refs)
        for row, sub, gpu in naive_pages(one):
            at = worker * page * geometry.factor + sub * page
            for ref in refs:
                there = tensors[ref.tensor][gpu].numpy()[: ref.page_size_bytes]
                here = region[row, at : at + ref.page_size_bytes]
                if to_gpu:
                    there[:] = here
                else:
                    here[:] = there
                at += ref.page_size_bytes


def naive_whole_rows(geometry: Geometry, work: TransferJob) -> set[int]:
    """The rows whose every sub-block a job writes once."""
    subs: dict[int, list[int]] = {}
    for one in work.groups:
        for row, sub, _ in naive_pages(one):
            subs.setdefault(row, []).append(sub)
    return {row for row, found in subs.items() if sorted(found) == list(range(geometry.factor))}

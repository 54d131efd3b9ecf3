"""A stack in memory for tests of the replay: a CPU and an fs tier as two LRU dicts that move real bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import numpy as np
import torch
from click.testing import CliRunner, Result

from kvtier.cli import main
from kvtier.config import StackConfig
from kvtier.stack import StackStats, TierStats
from kvtier.tier.contract import LookupResult
from kvtier.types.geometry import Geometry, KVLayout
from kvtier.types.jobs import (
    LOADED,
    MISSING,
    PRESENT,
    STORED,
    BlockOutcome,
    DropReason,
    GPUGroup,
    JobKind,
    JobResult,
    TransferJob,
    dropped,
)
from kvtier.types.keys import JobId, OffloadKey, RequestId
from kvtier.types.requests import RequestInfo

Row = np.ndarray
Corrupt = Callable[[OffloadKey, Row], None]


class DictTier:
    """Rows by key, the least recently used first."""

    def __init__(self, num_blocks: int) -> None:
        self.rows: OrderedDict[OffloadKey, Row] = OrderedDict()
        self.num_blocks = num_blocks
        self.evictions = 0
        self.hits = 0

    def put(self, key: OffloadKey, row: Row) -> None:
        self.rows.setdefault(key, row)
        while len(self.rows) > self.num_blocks:
            self.rows.popitem(last=False)
            self.evictions += 1


@dataclass
class FakeRequest:
    stack: FakeStack
    request_id: RequestId

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        self.stack.touched.append(list(keys))
        for tier in self.stack.tiers.values():
            for key in reversed(keys):
                if key in tier.rows:
                    tier.rows.move_to_end(key)

    def end(self, output_tokens: int | None) -> None:
        self.stack.ended.append((self.request_id, output_tokens))


class FakeStack:
    """Answers like TierStack, at once. Everything stored goes to both tiers.

    `corrupt` may change a row on its way to the GPU; keys in `lost` are found by lookup and missing at load; keys in
    `refused` are dropped by store.
    """

    def __init__(
        self, layout: KVLayout, kv_caches: Sequence[torch.Tensor], cpu_blocks: int = 64, fs_blocks: int = 1024
    ) -> None:
        self.geometry = Geometry(layout)
        self.tensors = [tensor.numpy().view(np.uint8) for tensor in kv_caches]
        self.tiers = {"cpu": DictTier(cpu_blocks), "fs": DictTier(fs_blocks)}
        self.corrupt: Corrupt = lambda key, row: None
        self.lost: set[OffloadKey] = set()
        self.refused: set[OffloadKey] = set()
        self.jobs: list[TransferJob] = []
        self.touched: list[list[OffloadKey]] = []
        self.begun: list[tuple[RequestId, list[OffloadKey], float | None, RequestInfo | None]] = []
        self.ended: list[tuple[RequestId, int | None]] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    async def lookup(self, keys: Sequence[OffloadKey]) -> list[LookupResult]:
        answers = {"cpu": LookupResult.HIT, "fs": LookupResult.HIT_PENDING, None: LookupResult.MISS}
        return [answers[name] for name in self.locate(keys)]

    def locate(self, keys: Sequence[OffloadKey]) -> list[str | None]:
        return [next((name for name, tier in self.tiers.items() if key in tier.rows), None) for key in keys]

    def job(self, kind: JobKind, groups: Sequence[GPUGroup], timeout_seconds: float | None = None) -> TransferJob:
        return TransferJob(JobId(len(self.jobs)), kind, tuple(groups))

    async def run(self, job: TransferJob) -> JobResult:
        self.jobs.append(job)
        move = self._store if job.kind is JobKind.STORE else self._load
        return JobResult(job.job_id, tuple(map(move, job.groups)))

    def request(
        self,
        request_id: RequestId,
        keys: Sequence[OffloadKey],
        *,
        info: RequestInfo | None = None,
        time: float | None = None,
    ) -> FakeRequest:
        self.begun.append((request_id, list(keys), time, info))
        return FakeRequest(self, request_id)

    async def drain(self, timeout_seconds: float, backlog: int = 0) -> bool:
        return True

    def stats(self) -> StackStats:
        row = self.geometry.row_bytes
        tiers = {
            name: TierStats(
                hits=tier.hits,
                load_bytes=tier.hits * row,
                load_seconds=0.5,
                evictions=tier.evictions,
                used_bytes=len(tier.rows) * row,
                peak_bytes=len(tier.rows) * row,
                capacity_bytes=tier.num_blocks * row,
            )
            for name, tier in self.tiers.items()
        }
        return StackStats(tiers, 0)

    def _store(self, transfer: GPUGroup) -> tuple[BlockOutcome, ...]:
        outcomes = []
        for position, key in enumerate(transfer.keys):
            if key in self.refused:
                outcomes.append(dropped(DropReason.NO_ROW))
                continue
            present = self.locate([key])[0] is not None
            row = np.zeros(self.geometry.row_bytes, np.uint8)
            for part, view in self._pages(transfer, position):
                row[part] = view
            for tier in self.tiers.values():
                tier.put(key, row)
            outcomes.append(PRESENT if present else STORED)
        return tuple(outcomes)

    def _load(self, transfer: GPUGroup) -> tuple[BlockOutcome, ...]:
        outcomes = []
        for position, key in enumerate(transfer.keys):
            name = self.locate([key])[0]
            if name is None or key in self.lost:
                for tier in self.tiers.values():
                    tier.rows.pop(key, None)
                outcomes.append(MISSING)
                continue
            self.tiers[name].hits += 1
            row = self.tiers[name].rows[key].copy()
            self.corrupt(key, row)
            for part, view in self._pages(transfer, position):
                view[:] = row[part]
            self.tiers["cpu"].put(key, self.tiers[name].rows[key])
            outcomes.append(LOADED)
        return tuple(outcomes)

    def _pages(self, transfer: GPUGroup, position: int) -> list[tuple[slice, Row]]:
        """(where in the row, the GPU page) for every page of one offloaded block that the job names."""
        pages = []
        for block, sub_block, gpu_block in zip(*(part.tolist() for part in transfer.runs.pages()), strict=True):
            if block == position:
                for index, ref in enumerate(self.geometry.layout.groups[transfer.group].refs):
                    start = self.geometry.offset(transfer.group, 0, sub_block, index)
                    page = self.tensors[ref.tensor][gpu_block, : ref.page_size_bytes]
                    pages.append((slice(start, start + ref.page_size_bytes), page))
        return pages


def fake_stack(config: StackConfig, layout: KVLayout, kv_caches: Sequence[torch.Tensor]) -> FakeStack:
    """For Replay: a fake stack whatever the config says."""
    return FakeStack(layout, kv_caches)


def run(*args: str) -> Result:
    """`kvtier replay` with these arguments, in this process; what it raised unexpectedly is raised."""
    result = CliRunner().invoke(main, ["replay", *args])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result

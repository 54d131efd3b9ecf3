"""Stacks of real tiers small enough for tests, and an engine whose every page names the key it belongs to."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvtier.config import parse_stack, stack_parts
from kvtier.config.load import StackConfig
from kvtier.stack import StackParts, TierStack
from kvtier.tier.registry import Backends, discover
from kvtier.types.arrays import int_array
from kvtier.types.geometry import Geometry, GroupKind, GroupLayout, KVLayout, TensorRef
from kvtier.types.gpu_runs import GPURuns
from kvtier.types.jobs import BlockOutcome, GPUGroup, JobKind, JobResult
from kvtier.types.keys import JobId, OffloadKey, key_group, make_key
from kvtier.types.namespace import Namespace

if TYPE_CHECKING:
    from support_driver import Stepped

PAGE = 4096
JUNK = 0xEE

PLAIN = KVLayout((GroupLayout((TensorRef(0, PAGE),)),))
HYBRID = KVLayout(
    (
        GroupLayout((TensorRef(0, 1000), TensorRef(1, 333), TensorRef(2, 24))),
        GroupLayout((TensorRef(3, 2048), TensorRef(4, 513)), kind=GroupKind.SLIDING_WINDOW, window_tokens=64),
    ),
    block_size_factor=4,
)


def keys(count: int, group: int = 0, start: int = 0, tag: str = "") -> list[OffloadKey]:
    """Distinct keys of a group."""
    return [make_key(hashlib.sha256(f"{tag}/{start + i}".encode()).digest(), group) for i in range(count)]


def page(key: OffloadKey, sub_block: int, ref: int, length: int, worker: int = 0) -> np.ndarray:
    """What one page must hold: a function of its key, its place in the block, its tensor and its worker."""
    owner = hashlib.sha256(key + bytes((sub_block, ref, worker))).digest()
    words = np.arange(-(-length // 8), dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return (words ^ np.frombuffer(owner, np.uint64, 1)).view(np.uint8)[:length]


class Engine:
    """One worker's KV cache on a CPU device, as an engine holds it: paged tensors, handed in as jobs name them."""

    def __init__(self, layout: KVLayout, num_blocks: int, strided: bool = False, worker: int = 0) -> None:
        self.layout, self.num_blocks, self.worker = layout, num_blocks, worker
        pages: dict[int, int] = {}
        for group in layout.groups:
            for ref in group.refs:
                pages[ref.tensor] = max(pages.get(ref.tensor, 0), ref.page_size_bytes)
        import torch  # a second that processes without tensors need not spend

        gap = 13 if strided else 0
        self.storages = [np.full((num_blocks, pages[i] + gap), JUNK, np.uint8) for i in range(len(pages))]
        self.pages = [storage[:, gap // 2 : gap // 2 + pages[i]] for i, storage in enumerate(self.storages)]
        self.kv_caches = [torch.from_numpy(each) for each in self.pages]

    @property
    def factor(self) -> int:
        return self.layout.block_size_factor

    def compute(self, one: GPUGroup) -> None:
        """Fill the GPU blocks of a transfer as its keys say."""
        for key, sub, gpu in self._pages(one):
            for index, ref in enumerate(self.layout.groups[one.group].refs):
                size = ref.page_size_bytes
                self.pages[ref.tensor][gpu, :size] = page(key, sub, index, size, self.worker)

    def wrong(self, one: GPUGroup, outcomes: Sequence[BlockOutcome] | None = None) -> list[str]:
        """The pages of a transfer that do not hold what their keys say; only blocks that ended well, if told how."""
        ok = {key: outcome.ok for key, outcome in zip(one.keys, outcomes, strict=True)} if outcomes else {}
        bad = []
        for key, sub, gpu in self._pages(one):
            if not ok.get(key, True):
                continue
            for index, ref in enumerate(self.layout.groups[one.group].refs):
                size = ref.page_size_bytes
                if not np.array_equal(self.pages[ref.tensor][gpu, :size], page(key, sub, index, size, self.worker)):
                    bad.append(
                        f"worker {self.worker}, group {one.group}, key {key.hex()[:8]}, {sub=}, {index=}, {gpu=}"
                    )
        return bad

    def _pages(self, one: GPUGroup) -> Iterable[tuple[OffloadKey, int, int]]:
        for block, sub, gpu in zip(*(part.tolist() for part in one.runs.pages()), strict=True):
            yield one.keys[block], sub, gpu

    def wipe(self) -> None:
        """Junk in every byte, between the pages as well."""
        for storage in self.storages:
            storage[:] = JUNK

    def snapshot(self) -> list[np.ndarray]:
        return [storage.copy() for storage in self.storages]

    def untouched(self, before: Sequence[np.ndarray], touched: Iterable[GPUGroup]) -> bool:
        """True if no byte changed since a snapshot but those of the pages that these transfers name."""
        now = self.snapshot()
        for one in touched:
            for _, _, gpu in self._pages(one):
                for ref in self.layout.groups[one.group].refs:
                    left = (self.storages[ref.tensor].shape[1] - self.pages[ref.tensor].shape[1]) // 2
                    now[ref.tensor][gpu, left : left + ref.page_size_bytes] = before[ref.tensor][
                        gpu, left : left + ref.page_size_bytes
                    ]
        return all(np.array_equal(old, new) for old, new in zip(before, now, strict=True))


def whole(names: Sequence[OffloadKey], first_gpu_block: int = 0, factor: int = 1) -> GPUGroup:
    """Whole offloaded blocks of one group on consecutive GPU blocks."""
    ids = range(first_gpu_block, first_gpu_block + len(names) * factor)
    return GPUGroup(key_group(names[0]), tuple(names), GPURuns.whole(ids, factor))


def runs_of(pieces: Sequence[tuple[int, int, Sequence[int]]]) -> GPURuns:
    """GPURuns from (offloaded block, first sub-block, GPU blocks)."""
    return GPURuns(
        int_array([block for block, _, _ in pieces]),
        int_array([first for _, first, _ in pieces]),
        int_array([len(ids) for _, _, ids in pieces]),
        int_array([gpu for _, _, ids in pieces for gpu in ids]),
    )


def statuses(result: JobResult) -> list[str]:
    """The status of every block, `dropped:reason` for those that were dropped."""
    flat = [outcome for group in result.outcomes for outcome in group]
    return [f"{one.status}:{one.reason}" if one.reason else str(one.status) for one in flat]


def stack_file(
    layout: KVLayout,
    rows: int,
    *lowers: dict[str, object],
    backends: Backends | None = None,
    alignment: int = PAGE,
    cpu: dict[str, object] | None = None,
    gpu: dict[str, object] | None = None,
    **top: object,
) -> StackConfig:
    """A stack file of a gpu tier, a cpu tier of `rows` rows and lower tiers, through the real parser."""
    size = rows * Geometry(layout, alignment).row_bytes
    fixed: dict[str, object] = {"type": "cpu", "cpu_bytes_to_use": size, "huge_pages": False}
    tiers = [{"type": "gpu"} | (gpu or {}), fixed | (cpu or {}), *lowers]
    lines = [f"{key}: {value}" for key, value in top.items()] + ["tiers:"]
    for tier in tiers:
        lines += [f"  {'-' if i == 0 else ' '} {key}: {value}" for i, (key, value) in enumerate(tier.items())]
    return parse_stack("\n".join(lines), backends or discover())


def fs(*roots: Path, capacity: int = 8 << 20, **more: object) -> dict[str, object]:
    """An fs tier in a few folders; buffered threads unless told otherwise, so it is the same on any disk."""
    fixed = {"type": "fs", "roots": [str(root) for root in roots], "capacity": capacity, "min_free_bytes": 0}
    return fixed | {"io_engine": "threads", "direct": "off", "io_threads": 2} | more


def shared_fs(root: Path, capacity: int = 8 << 20, **more: object) -> dict[str, object]:
    """A shared_fs tier in a folder, otherwise as `fs`."""
    tier = fs(capacity=capacity, **more) | {"type": "shared_fs", "root": str(root)}
    return {name: value for name, value in tier.items() if name != "roots"}


def disk_tier(layout: str, root: Path, **more: object) -> dict[str, object]:
    """The tier that keeps its blocks in this layout: `slab` or `files`."""
    return (fs if layout == "slab" else shared_fs)(root, **more)


def parts_of(config: StackConfig, engine: Engine, backends: Backends | None = None, **settings: float) -> StackParts:
    """A stack's parts, its tiers not open yet: `parts.tiers` are the very objects that will be."""
    parts = stack_parts(
        config, Namespace(engine.layout, model="test"), engine.kv_caches, backends=backends or discover()
    )
    return dataclasses.replace(parts, settings=dataclasses.replace(parts.settings, **settings))


@asynccontextmanager
async def opened(parts: StackParts) -> AsyncIterator[TierStack]:
    """An open stack, closed at the end, its sums checked before and after."""
    async with TierStack(parts) as stack:
        yield stack
        stack.check_integrity()
    stack.check_integrity()


def running(config: StackConfig, engine: Engine, **settings: float):
    """`opened` for a stack of installed tiers."""
    return opened(parts_of(config, engine, **settings))


async def store(stack: TierStack, engine: Engine, *groups: GPUGroup, **more: float) -> JobResult:
    """Compute the blocks of a store and hand them to the stack."""
    for one in groups:
        engine.compute(one)
    return await stack.run(stack.job(JobKind.STORE, groups, **more))


async def load(stack: TierStack, engine: Engine, *groups: GPUGroup, **more: float) -> JobResult:
    """Load blocks and compare every byte of those that are reported as loaded."""
    result = await stack.run(stack.job(JobKind.LOAD, groups, **more))
    for one, outcomes in zip(groups, result.outcomes, strict=True):
        assert not engine.wrong(one, outcomes)
    return result


def run_jobs(stack: Stepped, *jobs: JobId, seconds: float = 20.0) -> dict[JobId, JobResult]:
    """Step as an idle engine does until these jobs have ended."""
    results: dict[JobId, JobResult] = {}
    until = time.monotonic() + seconds
    while set(jobs) - set(results):
        assert time.monotonic() < until, "the jobs did not end in time"
        for result in stack.step():
            results[result.job_id] = result
        if set(jobs) - set(results):
            stack.wait(0.5)
    return results


def held(stack: TierStack) -> dict[str, dict[str, int]]:
    """Slots by state of every owned tier."""
    return {name: tier.slots for name, tier in stack.stats().tiers.items() if tier.slots}


async def until(condition: Callable[[], bool], timeout_seconds: float = 20.0) -> None:
    """Let the loop turn until something holds; a deadline makes its absence a failure instead of a hang."""
    async with asyncio.timeout(timeout_seconds):
        while not condition():  # noqa: ASYNC110 - what is waited for is a plain value
            await asyncio.sleep(0.002)

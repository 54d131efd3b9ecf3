"""The engine's side of a replay: KV tensors on a device, a block pool and the expected content for each group."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

import torch

from kvtier.errors import ConfigError, ResourceError
from kvtier.geometry import KVLayout
from kvtier.jobs import IntArray
from kvtier.loadstore import KVCaches
from kvtier.planner import StoreMode, StorePlanner
from kvtier.replay.content import BlockContent
from kvtier.replay.pool import BlockPool

NO_BLOCK = -1


@dataclass(frozen=True, slots=True, eq=False)
class EngineCache:
    """GPU blocks of a layout: a tensor for each tensor reference; a pool, a store planner, a content for each group.

    Block ids of a group are good in all of the group's tensors. No two groups share a tensor.
    """

    layout: KVLayout
    device: str
    tensors: tuple[torch.Tensor, ...]
    pools: tuple[BlockPool, ...]
    planners: tuple[StorePlanner, ...]
    contents: tuple[BlockContent, ...]

    @staticmethod
    def allocate(
        layout: KVLayout, num_blocks: int, device: str, store_mode: StoreMode = StoreMode.EAGER
    ) -> EngineCache:
        """Zeroed tensors for `num_blocks` GPU blocks of every group. Raises ResourceError where memory is short."""
        sizes = {ref.tensor: ref.page_size_bytes for group in layout.groups for ref in group.refs}
        need = num_blocks * sum(sizes.values())
        have = _available_bytes(device)
        if need > have:
            raise ResourceError(
                f"the GPU pool needs {need} bytes on {device} and {have} are available: "
                f"lower --block-bytes or --gpu-blocks"
            )
        tensors = tuple(
            torch.zeros((num_blocks, sizes[index]), dtype=torch.int8, device=device) for index in sorted(sizes)
        )
        contents = tuple(BlockContent(group, tensors) for group in layout.groups)
        planners = tuple(StorePlanner(store_mode, layout.block_size_factor) for _ in layout.groups)
        pools = tuple(BlockPool(num_blocks, planner.fenced) for planner in planners)
        return EngineCache(layout, device, tensors, pools, planners, contents)

    @property
    def kv_caches(self) -> KVCaches:
        """The tensors as a stack wants them."""
        return KVCaches(self.tensors)

    def used_bytes(self) -> int:
        """Bytes of the GPU blocks that are referenced or hold a key, over all groups."""
        return sum(pool.num_used * group.page_bytes for pool, group in zip(self.pools, self.layout.groups, strict=True))

    def peak_bytes(self) -> int:
        """The most bytes ever used, each group at its own peak."""
        return sum(
            pool.peak_blocks * group.page_bytes for pool, group in zip(self.pools, self.layout.groups, strict=True)
        )

    def capacity_bytes(self) -> int:
        """Bytes of all GPU blocks."""
        return sum(
            pool.num_blocks * group.page_bytes for pool, group in zip(self.pools, self.layout.groups, strict=True)
        )

    def release(self, tables: list[IntArray]) -> None:
        """Let go of the blocks in a request's tables, one for each of the first groups. The leaf goes first, so that a
        prefix outlives what follows it."""
        for pool, table in zip(self.pools, tables, strict=False):
            pool.release(table[table != NO_BLOCK][::-1].tolist())


def choose_device(name: str) -> str:
    """The torch device for `auto`, `cpu` or `cuda`. Raises ConfigError if there is none."""
    cuda = torch.cuda.is_available()
    if name == "cuda" and not cuda:
        raise ConfigError("this machine has no CUDA device that torch can use; choose cpu", "--device")
    return "cuda" if name == "cuda" or (name == "auto" and cuda) else "cpu"


def _available_bytes(device: str) -> int:
    """Memory that can be had on a device now; where the system does not say, all it has."""
    if device != "cpu":
        return int(torch.cuda.mem_get_info()[0])
    try:
        found = re.search(r"^MemAvailable:\s+([0-9]+) kB$", Path("/proc/meminfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return int(found[1]) * 1024 if found else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGESIZE")

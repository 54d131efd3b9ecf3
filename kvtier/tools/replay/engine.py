"""The engine's side of a replay: KV tensors on a device, a block pool and the expected content for each group."""

import os
from collections.abc import Sequence
from typing import Protocol

import torch

from kvtier.errors import ConfigError, ResourceError
from kvtier.planner import StoreMode, StorePlanner
from kvtier.tier.memory_limits import SystemLimits, tightest
from kvtier.tools.replay.content import BlockContent, Pages, WrongPage
from kvtier.tools.replay.pool import BlockPool
from kvtier.types.arrays import IntArray
from kvtier.types.geometry import KVLayout

NO_BLOCK = -1


class Content(Protocol):
    """What the blocks of one group hold."""

    def write(self, pages: Pages) -> None:
        """Afterwards each page holds the content of its key."""

    def check(self, pages: Pages) -> list[WrongPage]:
        """The pages that do not hold the content of their key."""


class EngineBlocks:
    """GPU blocks of a layout by their ids: a pool, a store planner and a content for each group.

    Block ids of a group are good in all of the group's tensors. No two groups share a tensor.
    """

    def __init__(
        self, layout: KVLayout, num_blocks: int, contents: Sequence[Content], store_mode: StoreMode = StoreMode.EAGER
    ) -> None:
        self.layout = layout
        self.contents = contents
        self.planners = [StorePlanner(store_mode, layout.block_size_factor) for _ in layout.groups]
        self.pools = [BlockPool(num_blocks, planner.fenced) for planner in self.planners]

    def release(self, tables: list[IntArray]) -> None:
        """Release the blocks in a request's tables, one for each of the first groups. The leaf goes first, so that a
        prefix outlives what follows it."""
        for pool, table in zip(self.pools, tables, strict=False):
            pool.release(table[table != NO_BLOCK][::-1].tolist())


class EngineCache(EngineBlocks):
    """GPU blocks with their bytes: a tensor for each tensor reference of the layout."""

    def __init__(self, layout: KVLayout, num_blocks: int, device: str, store_mode: StoreMode = StoreMode.EAGER) -> None:
        """Zeroed tensors for `num_blocks` GPU blocks of every group. Raises ResourceError where memory is short."""
        need = num_blocks * sum(group.page_bytes for group in layout.groups)
        have = _available_bytes(device)
        if need > have:
            raise ResourceError(
                f"the GPU pool needs {need} bytes on {device} and {have} are available: "
                f"lower --block-bytes or --gpu-blocks"
            )
        self.device = device
        self.tensors = allocate_tensors(layout, num_blocks, device)
        super().__init__(layout, num_blocks, [BlockContent(group, self.tensors) for group in layout.groups], store_mode)


def allocate_tensors(layout: KVLayout, num_blocks: int, device: str) -> tuple[torch.Tensor, ...]:
    """A zeroed tensor for each tensor reference of a layout, with `num_blocks` GPU blocks."""
    sizes = {ref.tensor: ref.page_size_bytes for group in layout.groups for ref in group.refs}
    return tuple(torch.zeros((num_blocks, sizes[index]), dtype=torch.int8, device=device) for index in sorted(sizes))


def choose_device(name: str) -> str:
    """The torch device for `auto`, `cpu` or `cuda`. Raises ConfigError if there is none."""
    cuda = torch.cuda.is_available()
    if name == "cuda" and not cuda:
        raise ConfigError("this machine has no CUDA device that torch can use; choose cpu", "--device")
    return "cuda" if name == "cuda" or (name == "auto" and cuda) else "cpu"


def _available_bytes(device: str) -> int:
    """Memory that is available on a device now; all of its memory where the system does not report that."""
    if device != "cpu":
        return int(torch.cuda.mem_get_info()[0])
    limit = tightest(SystemLimits(), None)
    return limit.have_bytes if limit else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGESIZE")

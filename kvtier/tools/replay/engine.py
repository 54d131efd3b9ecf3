"""The engine's side of a replay: KV tensors on a device, a block pool and the expected content for each group.

A block of a pool is *referenced* (a request or a store uses it) or *idle*. Idle blocks wait in the order they are
reused in: those without a key first, then the one that was released longest ago. Only idle blocks are ever reused, and
of those none that a store still reads.
"""

import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Protocol

import torch

from kvtier.errors import ConfigError, IntegrityError, ResourceError
from kvtier.planner import StoreMode, StorePlanner
from kvtier.tier.memory_limits import SystemLimits, tightest
from kvtier.tools.replay.content import BlockContent, Pages, WrongPage
from kvtier.types.arrays import IntArray
from kvtier.types.geometry import KVLayout
from kvtier.types.keys import OffloadKey


class BlockPool:
    """GPU block ids 0 .. num_blocks-1 of one group. Every method is all or nothing.

    `fenced(block)` is true while a store still reads the block.
    """

    def __init__(self, num_blocks: int, fenced: Callable[[int], bool] = lambda block: False) -> None:
        self._fenced = fenced
        self._references = [0] * num_blocks
        self._key_of: list[OffloadKey | None] = [None] * num_blocks
        self._block_of: dict[OffloadKey, int] = {}
        self._empty = OrderedDict.fromkeys(range(num_blocks))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self.evictions = 0
        self.peak_blocks = 0

    @property
    def num_blocks(self) -> int:
        return len(self._references)

    @property
    def num_empty(self) -> int:
        """Blocks that are idle and hold no key."""
        return len(self._empty)

    @property
    def num_used(self) -> int:
        """Blocks that are referenced or hold a key."""
        return self.num_blocks - len(self._empty)

    def find(self, key: OffloadKey) -> int | None:
        """The block that holds a key, or None. Valid until the next `allocate` unless retained."""
        return self._block_of.get(key)

    def key_of(self, block: int) -> OffloadKey | None:
        """The key a block holds, or None."""
        return self._key_of[block]

    def retain(self, blocks: Sequence[int]) -> None:
        """Add a reference to each block."""
        for block in blocks:
            if not self._references[block]:
                self._idle.pop(block, None)
                self._empty.pop(block, None)
            self._references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Take a reference from each block. What becomes idle is reused in the order given: pass the leaf first."""
        for block in blocks:
            if self._references[block] < 1:
                raise IntegrityError(f"GPU block {block} was released more often than retained")
            self._references[block] -= 1
            if not self._references[block]:
                (self._empty if self._key_of[block] is None else self._idle)[block] = None

    def allocate(self, count: int) -> list[int] | None:
        """Take `count` blocks, each with one reference and no key, forgetting what the oldest idle ones held.

        Returns None and changes nothing if fewer are free now.
        """
        empty = list(islice(self._empty, count))
        idle = list(islice((block for block in self._idle if not self._fenced(block)), count - len(empty)))
        taken = empty + idle
        if len(taken) < count:
            return None
        for block in idle:
            self._forget(block)
        self.evictions += len(idle)
        self.retain(taken)
        self.peak_blocks = max(self.peak_blocks, self.num_used)
        return taken

    def publish(self, block: int, key: OffloadKey) -> None:
        """A referenced block now holds a key. Another block that already does stays the one that is found."""
        if not self._references[block] or self._key_of[block] is not None:
            raise IntegrityError(f"GPU block {block} must be referenced and hold no key to be published")
        self._key_of[block] = key
        self._block_of.setdefault(key, block)

    def coldest(self) -> Iterator[int]:
        """Idle blocks that hold a key, in the order they will be reused. The pool must not change meanwhile."""
        return iter(self._idle)

    def check_integrity(self) -> None:
        """Raise IntegrityError if a block is in no state or in two, or a key leads to a block that does not hold it."""
        for block, references in enumerate(self._references):
            states = (references > 0) + (block in self._idle) + (block in self._empty)
            holds = self._key_of[block] is not None
            if states != 1 or (block in self._idle and not holds) or (block in self._empty and holds):
                raise IntegrityError(f"GPU block {block}: {references} references, holds a key: {holds}")
        for key, block in self._block_of.items():
            if self._key_of[block] != key:
                raise IntegrityError(f"GPU block {block} does not hold the key that leads to it")

    def _forget(self, block: int) -> None:
        key = self._key_of[block]
        self._key_of[block] = None
        if key is not None and self._block_of.get(key) == block:
            del self._block_of[key]


NO_BLOCK = -1


class Content(Protocol):
    """Content of the blocks of one group."""

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
    limit = tightest(SystemLimits())
    return limit.have_bytes if limit else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGESIZE")

"""Loads for a usable prefix: which keys, and into which GPU blocks."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvtier.errors import UsageError
from kvtier.planner.prefix import prefix_unit, window_start
from kvtier.types.arrays import IntArray, int_array
from kvtier.types.geometry import KVLayout
from kvtier.types.gpu_runs import GPURuns
from kvtier.types.jobs import GPUGroup
from kvtier.types.keys import GroupIndex, OffloadKey


@dataclass(frozen=True, slots=True, eq=False)
class GroupLoad:
    """A group's share of a load: offloaded blocks by their index in the request, and the GPU blocks they go to."""

    group: GroupIndex
    positions: IntArray
    runs: GPURuns

    def transfer(self, keys: Sequence[OffloadKey]) -> GPUGroup:
        """The share of a transfer job; `keys[i]` is the key of the request's i-th offloaded block of this group."""
        return GPUGroup(self.group, tuple(keys[position] for position in self.positions.tolist()), self.runs)


def blocks_to_load(layout: KVLayout, group: int, num_tokens: int, computed_tokens: int = 0) -> range:
    """The GPU blocks of a group, by index in the request, that a hit of `num_tokens` has to load.

    `computed_tokens` is the prefix the GPU holds already, valid in every group; its blocks are not loaded again.
    Nothing before a sliding window is loaded, and of a mamba group only the state at `num_tokens`: the indices below
    the range that the GPU does not hold are holes, and an engine gives them its null block.
    """
    if num_tokens % prefix_unit(layout):
        raise UsageError(f"{num_tokens} tokens are no multiple of the prefix unit of {prefix_unit(layout)}")
    kind = layout.groups[group]
    end = num_tokens // kind.block_size
    first = max(window_start(kind, num_tokens), computed_tokens) // kind.block_size
    return range(min(first, end), end)


def plan_load(
    layout: KVLayout, num_tokens: int, computed_tokens: int, block_tables: Sequence[Sequence[int]]
) -> tuple[GroupLoad, ...]:
    """The load after which a request's first `num_tokens` tokens, a usable prefix, are on the GPU.

    `block_tables[g][i]` is the GPU block of the request's i-th block in group g; only those of `blocks_to_load` are
    read. Where the GPU holds the first k GPU blocks of an offloaded block, or a window begins inside one, only the
    rest of it is loaded. Groups with nothing to load are left out. Raises UsageError for a table that is too short or
    has a hole (a negative id) where a block has to go.
    """
    if len(block_tables) != len(layout.groups):
        raise UsageError(f"the layout has {len(layout.groups)} groups, {len(block_tables)} block tables were given")
    factor = layout.block_size_factor
    loads = []
    for group, table in enumerate(block_tables):
        wanted = blocks_to_load(layout, group, num_tokens, computed_tokens)
        if not wanted:
            continue
        ids = int_array(table[wanted.start : wanted.stop])
        if len(ids) != len(wanted) or int(ids.min()) < 0:
            raise UsageError(
                f"group {group} needs GPU blocks at {wanted.start} to {wanted.stop - 1} of its block table"
            )
        runs = GPURuns.consecutive(wanted.start, ids, factor)
        positions = np.arange(wanted.start // factor, wanted.stop // factor, dtype=np.int64)
        loads.append(GroupLoad(GroupIndex(group), positions, runs))
    return tuple(loads)

"""The usable prefix of a prompt, which is the longest one that is valid in every group of a hybrid model, and its load.

A prefix of n tokens is valid in a group when the group has what computing token n needs:

    full attention    every block from the first to n
    sliding window    the blocks that hold the last `window_tokens` tokens before n; nothing before them
    mamba             the state at exactly n: the block that ends there

Lengths are multiples of every group's tokens per offloaded block, and zero is always valid.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvtier.errors import UsageError
from kvtier.types.arrays import IntArray, int_array
from kvtier.types.geometry import GroupKind, GroupLayout, KVLayout
from kvtier.types.gpu_runs import GPURuns
from kvtier.types.jobs import GPUGroup
from kvtier.types.keys import GroupIndex, OffloadKey

Presence = Sequence[bool] | Callable[[int], bool]
"""Which offloaded blocks of one group are there, by index from the prompt's start: flags (blocks past the end are not
there), or a function of the index."""


def prefix_unit(layout: KVLayout) -> int:
    """Tokens by which usable lengths differ: the least common multiple of the groups' offloaded blocks."""
    return math.lcm(*map(layout.tokens_per_offloaded_block, range(len(layout.groups))))


def hit_limit(layout: KVLayout, num_tokens: int) -> int:
    """The longest prefix, in tokens, that a prompt of `num_tokens` may hit: at least one token is left to compute.

    A prompt of exactly n blocks hits at most n - 1 of them, because the logits of its last token are needed.
    """
    unit = prefix_unit(layout)
    return max(0, num_tokens - 1) // unit * unit


def window_start(group: GroupLayout, num_tokens: int) -> int:
    """The first token of a prefix of `num_tokens` that a group still needs."""
    if group.kind is GroupKind.FULL:
        return 0
    if group.kind is GroupKind.MAMBA:
        return max(0, num_tokens - 1)
    return max(0, num_tokens - group.window_tokens)


def usable_prefix(layout: KVLayout, present: Sequence[Presence], num_tokens: int) -> int:
    """The longest prefix, in tokens, of a prompt of `num_tokens` that is valid in every group; 0 if none is.

    `present[g]` names the offloaded blocks of group g that are there; blocks the GPU holds itself may count as there.
    Never more than `hit_limit`. Raises UsageError unless there is one presence for each group.
    """
    return next(usable_prefixes(layout, present, num_tokens), 0)


def usable_prefixes(layout: KVLayout, present: Sequence[Presence], num_tokens: int) -> Iterator[int]:
    """Every prefix that is valid in every group, in tokens, the longest first; as in `usable_prefix`.

    For engines whose ranks hold different blocks: they agree on a length that is valid for all of them.
    """
    if len(present) != len(layout.groups):
        raise UsageError(f"the layout has {len(layout.groups)} groups, presence was given for {len(present)}")
    unit = prefix_unit(layout)
    there = [_as_function(presence) for presence in present]
    length = hit_limit(layout, num_tokens)
    for index, group in enumerate(layout.groups):
        if group.kind is GroupKind.FULL:
            tokens = layout.tokens_per_offloaded_block(index)
            blocks = range(length // tokens)
            length = next((block for block in blocks if not there[index](block)), len(blocks)) * tokens
    length = length // unit * unit
    # Cheap checks first: a state is one block, a window may be many.
    windows = [index for index, group in enumerate(layout.groups) if group.kind is not GroupKind.FULL]
    windows.sort(key=lambda index: layout.groups[index].window_tokens)
    while length:
        gaps = (_first_missing(layout, index, there[index], length) for index in windows)
        gap = next((start for start in gaps if start is not None), None)
        if gap is None:
            yield length
            length -= unit
        else:
            # Every length from the missing block's end up to this one needs that block too.
            length = gap // unit * unit


def _as_function(presence: Presence) -> Callable[[int], bool]:
    if callable(presence):
        return presence
    flags = presence
    return lambda block: block < len(flags) and bool(flags[block])


def _first_missing(layout: KVLayout, index: int, there: Callable[[int], bool], length: int) -> int | None:
    """The first token of the first block that a group needs for a length and lacks; None if it lacks none."""
    tokens = layout.tokens_per_offloaded_block(index)
    first = window_start(layout.groups[index], length) // tokens
    return next((block * tokens for block in range(first, length // tokens) if not there(block)), None)


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

"""The usable prefix of a prompt: the longest prefix that is valid in every group of a hybrid model.

A prefix of n tokens is valid in a group when the group has what computing token n needs:

    full attention    every block from the first to n
    sliding window    the blocks that hold the last `window_tokens` tokens before n; nothing before them
    mamba             the state at exactly n: the block that ends there

Lengths are multiples of every group's tokens per offloaded block, and zero is always valid.
"""

import math
from collections.abc import Callable, Iterator, Sequence

from kvtier.errors import UsageError
from kvtier.types.geometry import GroupKind, GroupLayout, KVLayout

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

    `present[g]` says which offloaded blocks of group g are there; blocks the GPU holds itself may count as there.
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
    there = [_asked(presence) for presence in present]
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


def _asked(presence: Presence) -> Callable[[int], bool]:
    if callable(presence):
        return presence
    flags = presence
    return lambda block: block < len(flags) and bool(flags[block])


def _first_missing(layout: KVLayout, index: int, there: Callable[[int], bool], length: int) -> int | None:
    """The first token of the first block that a group needs for a length and lacks; None if it lacks none."""
    tokens = layout.tokens_per_offloaded_block(index)
    first = window_start(layout.groups[index], length) // tokens
    return next((block * tokens for block in range(first, length // tokens) if not there(block)), None)

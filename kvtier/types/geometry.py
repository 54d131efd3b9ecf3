"""Geometry of rows and slots: pure arithmetic, no I/O.

For one worker the page of a group is the sum of its tensor references. With `world_size` workers and
`block_size_factor` f::

    kv_bytes_per_block           = page bytes * copies        (world_size; 1 if the layout is replicated)
    kv_bytes_per_offloaded_block = kv_bytes_per_block * f
    aligned                      = round_up(kv_bytes_per_offloaded_block, BLOCK_SIZE_ALIGNMENT)
    num_blocks                   = cpu_bytes_to_use // aligned

A row is as long as the largest group needs. Inside a row worker w's slice of group g starts at
`w * page bytes * f`, at 0 for every worker of a replicated layout; inside a slice the f pages follow each other, and
inside a page the group's tensors. Padding sits once, at the row's end.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from kvtier.errors import GeometryError


class GroupKind(StrEnum):
    """Dependence of a group's blocks on the prefix; decides which prefix lengths are usable."""

    FULL = "full"
    SLIDING_WINDOW = "sliding_window"
    MAMBA = "mamba"


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A tensor that holds a group's blocks: its index and the bytes of one page (one GPU block) in it."""

    tensor: int
    page_size_bytes: int

    def __post_init__(self) -> None:
        if self.tensor < 0 or self.page_size_bytes < 1:
            raise GeometryError(f"a tensor reference needs tensor >= 0 and page_size_bytes >= 1, got {self}")


@dataclass(frozen=True)
class GroupLayout:
    """A KV cache group of one worker: its tensors and its tokens per GPU block.

    `padding_bytes` at the end of each page belong to no tensor: for engines that give every group pages of one size.
    """

    refs: tuple[TensorRef, ...]
    block_size: int = 16
    kind: GroupKind = GroupKind.FULL
    window_tokens: int = 0
    padding_bytes: int = 0

    def __post_init__(self) -> None:
        if not self.refs:
            raise GeometryError("a KV cache group needs at least one tensor reference")
        if self.block_size < 1:
            raise GeometryError(f"block_size must be at least 1 token, got {self.block_size}")
        if (self.kind is GroupKind.SLIDING_WINDOW) != (self.window_tokens > 0):
            raise GeometryError("window_tokens goes with sliding_window groups, and only with them")
        if self.padding_bytes < 0:
            raise GeometryError(f"padding_bytes must be at least 0, got {self.padding_bytes}")

    @classmethod
    def of_pages(
        cls,
        page_bytes: int | Sequence[int],
        *,
        block_size: int = 16,
        first_tensor: int = 0,
        kind: GroupKind = GroupKind.FULL,
        window_tokens: int = 0,
    ) -> GroupLayout:
        """A group in the tensors `first_tensor`, `first_tensor + 1`, ...: one for each number of bytes in a page."""
        sizes = [page_bytes] if isinstance(page_bytes, int) else page_bytes
        refs = tuple(TensorRef(first_tensor + index, size) for index, size in enumerate(sizes))
        return cls(refs, block_size, GroupKind(kind), window_tokens)

    @cached_property
    def page_bytes(self) -> int:
        """Bytes of one GPU block of this group on one worker, all its tensors together, and the padding."""
        return sum(ref.page_size_bytes for ref in self.refs) + self.padding_bytes


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Shape of an engine's KV cache: its groups, its workers, and GPU blocks per offloaded block.

    `replicated`: the workers' pages hold the same bytes, as the latents of MLA do. A row then keeps one copy, which
    worker 0 stores and every worker loads. A hybrid model has several groups: `KVLayout(groups=[full, window])`.
    """

    groups: Sequence[GroupLayout]
    world_size: int = 1
    block_size_factor: int = 1
    replicated: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "groups", tuple(self.groups))
        if not self.groups:
            raise GeometryError("a KV layout needs at least one group")
        if self.world_size < 1 or self.block_size_factor < 1:
            raise GeometryError(
                f"world_size and block_size_factor must be at least 1, "
                f"got {self.world_size} and {self.block_size_factor}"
            )

    @classmethod
    def of_pages(
        cls, page_bytes: int | Sequence[int], *, block_size: int = 16, world_size: int = 1, block_size_factor: int = 1
    ) -> KVLayout:
        """A group of full attention. Each tensor has pages of `page_bytes`: one tensor, or one for each number."""
        return cls((GroupLayout.of_pages(page_bytes, block_size=block_size),), world_size, block_size_factor)

    @property
    def num_copies(self) -> int:
        """Workers with a slice of their own in a row, the ones that store: workers 0 to num_copies - 1."""
        return 1 if self.replicated else self.world_size

    def tokens_per_offloaded_block(self, group: int) -> int:
        """Tokens one offloaded block of a group covers."""
        return self.groups[group].block_size * self.block_size_factor


def round_up(value: int, alignment: int) -> int:
    """The smallest multiple of `alignment` that is at least `value`."""
    return -(-value // alignment) * alignment


def stack_alignment(alignments: Iterable[int]) -> int:
    """The least common multiple of the tiers' BLOCK_SIZE_ALIGNMENT. Raises GeometryError on one below 1."""
    values = list(alignments)
    if any(value < 1 for value in values):
        raise GeometryError(f"BLOCK_SIZE_ALIGNMENT must be at least 1, got {values}")
    return math.lcm(*values)


@dataclass(frozen=True)
class Geometry:
    """A KV layout laid into rows of one alignment. What follows from the two is computed once."""

    layout: KVLayout
    alignment: int = 1

    def __post_init__(self) -> None:
        if self.alignment < 1:
            raise GeometryError(f"the row alignment must be at least 1, got {self.alignment}")

    @cached_property
    def num_groups(self) -> int:
        """KV cache groups."""
        return len(self.layout.groups)

    @cached_property
    def world_size(self) -> int:
        """Workers."""
        return self.layout.world_size

    @cached_property
    def num_copies(self) -> int:
        """Workers with a slice of their own in a row: `KVLayout.num_copies`."""
        return self.layout.num_copies

    @cached_property
    def factor(self) -> int:
        """GPU blocks per offloaded block."""
        return self.layout.block_size_factor

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of one row: the largest aligned offloaded block over the groups."""
        return max(self._aligned_bytes)

    @cached_property
    def _aligned_bytes(self) -> tuple[int, ...]:
        return tuple(round_up(block, self.alignment) for block in self._offloaded_bytes)

    @cached_property
    def _block_bytes(self) -> tuple[int, ...]:
        return tuple(group.page_bytes * self.num_copies for group in self.layout.groups)

    @cached_property
    def _offloaded_bytes(self) -> tuple[int, ...]:
        return tuple(block * self.factor for block in self._block_bytes)

    @cached_property
    def _gaps(self) -> tuple[list[tuple[int, int]], ...]:
        gaps = []
        for group, used, end in zip(self.layout.groups, self._offloaded_bytes, self._aligned_bytes, strict=True):
            page, padding = group.page_bytes, group.padding_bytes
            inside = [(at - padding, at) for at in range(page, used + 1, page)] if padding else []
            gaps.append([*inside, (used, end)] if used < end else inside)
        return tuple(gaps)

    def page_bytes(self, group: int) -> int:
        """Bytes of one GPU block of a group on one worker."""
        return self.layout.groups[group].page_bytes

    def worker_bytes(self, group: int) -> int:
        """Bytes of one worker's slice of an offloaded block of a group."""
        return self.page_bytes(group) * self.factor

    def kv_bytes_per_block(self, group: int) -> int:
        """Bytes of one GPU block of a group over all workers, what they hold in common once."""
        return self._block_bytes[group]

    def kv_bytes_per_offloaded_block(self, group: int) -> int:
        """Bytes of one offloaded block of a group over all workers, without padding."""
        return self._offloaded_bytes[group]

    def aligned_bytes(self, group: int) -> int:
        """Bytes of a group's offloaded block rounded up to the stack's alignment: what a lower tier stores."""
        return self._aligned_bytes[group]

    def padding_bytes(self, group: int) -> int:
        """Bytes of a row that a block of this group leaves unused."""
        return self.row_bytes - self.kv_bytes_per_offloaded_block(group)

    def offset(self, group: int, worker: int, sub_block: int = 0, ref: int = 0) -> int:
        """The place in a row at which a worker's page of a group begins: sub-block 0..f-1, tensor reference 0..n-1."""
        refs = self.layout.groups[group].refs
        if not (0 <= worker < self.world_size and 0 <= sub_block < self.factor and 0 <= ref < len(refs)):
            raise GeometryError(f"no page at group {group}, worker {worker}, sub-block {sub_block}, tensor {ref}")
        before = sum(refs[i].page_size_bytes for i in range(ref))
        return worker % self.num_copies * self.worker_bytes(group) + sub_block * self.page_bytes(group) + before

    def gaps(self, group: int) -> list[tuple[int, int]]:
        """The bytes of an aligned block that no tensor fills, the first and one past the last of each piece."""
        return self._gaps[group]

    def slices(self, worker: int) -> list[tuple[int, int]]:
        """For each group the bytes of a row that are a worker's own: the first, and one past the last."""
        firsts = [(group, self.offset(group, worker)) for group in range(self.num_groups)]
        return [(first, first + self.worker_bytes(group)) for group, first in firsts]

    def tokens_per_offloaded_block(self, group: int) -> int:
        """Tokens one offloaded block of a group covers."""
        return self.layout.tokens_per_offloaded_block(group)

    def num_blocks(self, cpu_bytes_to_use: int) -> int:
        """Rows that fit in a budget, never a byte more. Raises GeometryError if not even one fits."""
        rows = cpu_bytes_to_use // self.row_bytes
        if rows < 1:
            raise GeometryError(f"cpu_bytes_to_use: {self.too_small(cpu_bytes_to_use)}")
        return rows

    def too_small(self, budget_bytes: int) -> str:
        """The error text for a budget in which not even one block fits."""
        return (
            f"{budget_bytes} bytes hold no block: one block needs {self.row_bytes} bytes (alignment {self.alignment}, "
            f"{self.world_size} worker(s), {self.factor} GPU block(s) each); give it more"
        )

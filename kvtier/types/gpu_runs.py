"""The places of offloaded blocks on the GPU: runs of GPU blocks.

A run says which GPU blocks hold which sub-blocks of an offloaded block, so that unaligned heads and tails and interior
holes (null blocks of a sliding window) are explicit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field

import numpy as np
import numpy.typing as npt

from kvtier.errors import UsageError
from kvtier.types.arrays import IntArray, int_array
from kvtier.types.values import job_value


@job_value
class GPURuns:
    """The GPU blocks of sub-blocks: run i covers sub-blocks `firsts[i] .. firsts[i] + counts[i] - 1` of
    offloaded block `blocks[i]` (a position in the group's keys).

    `gpu_blocks` lists the GPU block ids of all runs one after another; its length is `counts.sum()`. `whole_factor` is
    the number of sub-blocks of a block if each block is known to be covered exactly once, without gaps; 0 if that has
    not been computed. Only `whole` sets it and only `select` passes it on, so no caller can state it of other runs.

    The arrays are kept as they are, and must not change; `whole` takes its ids into new ones.
    """

    blocks: IntArray
    firsts: IntArray
    counts: IntArray
    gpu_blocks: IntArray
    whole_factor: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if not (len(self.blocks) == len(self.firsts) == len(self.counts)):
            raise UsageError("blocks, firsts and counts of runs must be of one length")
        if int(self.counts.sum()) != len(self.gpu_blocks):
            raise UsageError(
                f"runs cover {int(self.counts.sum())} sub-blocks but name {len(self.gpu_blocks)} GPU blocks"
            )

    @staticmethod
    def whole(gpu_blocks: Sequence[int] | IntArray, factor: int = 1) -> GPURuns:
        """Runs for whole offloaded blocks: `factor` consecutive entries of `gpu_blocks` each."""
        ids = int_array(gpu_blocks)
        if ids.ndim != 1:
            raise UsageError(f"GPU blocks are given one after another, not in {ids.ndim} dimensions")
        if len(ids) % factor:
            raise UsageError(f"{len(ids)} GPU blocks are no whole number of offloaded blocks of {factor}")
        count = len(ids) // factor
        firsts, counts = np.zeros(count, dtype=np.int64), np.full(count, factor, dtype=np.int64)
        runs = GPURuns(np.arange(count, dtype=np.int64), firsts, counts, ids)
        object.__setattr__(runs, "whole_factor", factor)  # the only place that knows it without counting
        return runs

    @staticmethod
    def consecutive(first: int, gpu_blocks: IntArray, factor: int) -> GPURuns:
        """Runs for consecutive sub-blocks from the logical index `first` of a request on.

        Offloaded block 0 is the one that `first` lies in, so that a head may begin inside it.
        """
        logical = first + np.arange(len(gpu_blocks), dtype=np.int64)
        block = logical // factor - first // factor
        heads = np.flatnonzero(np.diff(block, prepend=-1))
        counts = np.diff(heads, append=len(gpu_blocks))
        return GPURuns(block[heads], logical[heads] % factor, int_array(counts), gpu_blocks)

    def pages(self) -> tuple[IntArray, IntArray, IntArray]:
        """An entry for each GPU page: (position of the offloaded block, sub-block, GPU block id), each (pages,)."""
        return np.repeat(self.blocks, self.counts), _ranges(self.firsts, self.counts), self.gpu_blocks

    def all_whole(self, num_blocks: int, factor: int) -> bool:
        """True if it is known already that each of `num_blocks` blocks is covered exactly once."""
        return self.whole_factor == factor and len(self.gpu_blocks) == num_blocks * factor

    def covers_whole(self, num_blocks: int, factor: int) -> npt.NDArray[np.bool_]:
        """For each of `num_blocks` positions: True if every sub-block 0..factor-1 is written exactly once."""
        if self.all_whole(num_blocks, factor):
            return np.ones(num_blocks, dtype=np.bool_)
        blocks, subs, _ = self.pages()
        inside = (blocks >= 0) & (blocks < num_blocks) & (subs >= 0) & (subs < factor)
        if not bool(inside.all()):
            raise UsageError("a run reaches outside the job's offloaded blocks")
        written = np.bincount(blocks * factor + subs, minlength=num_blocks * factor)
        once: npt.NDArray[np.bool_] = (written.reshape(num_blocks, factor) == 1).all(axis=1)
        return once

    def select(self, positions: IntArray) -> GPURuns:
        """The runs of the offloaded blocks at `positions`, renumbered to the order in `positions`."""
        return RunIndex(self).select(positions)


class RunIndex:
    """The runs of a group in the order of their blocks, to select those of some blocks without a walk over all."""

    def __init__(self, runs: GPURuns) -> None:
        self._runs = runs
        self._order = np.argsort(runs.blocks, kind="stable")
        self._blocks = runs.blocks[self._order]
        self._starts = np.cumsum(runs.counts) - runs.counts

    def select(self, positions: IntArray) -> GPURuns:
        """The runs of the offloaded blocks at `positions`, renumbered 0.. in that order."""
        runs = self._runs
        first = np.searchsorted(self._blocks, positions, side="left")
        runs_each = np.searchsorted(self._blocks, positions, side="right") - first
        index = self._order[_ranges(first, runs_each)]
        counts = runs.counts[index]
        gpu_blocks = runs.gpu_blocks[_ranges(self._starts[index], counts)]
        blocks = np.repeat(np.arange(len(positions), dtype=np.int64), runs_each)
        selected = GPURuns(blocks, runs.firsts[index], counts, gpu_blocks)
        object.__setattr__(selected, "whole_factor", runs.whole_factor)  # whole blocks stay whole
        return selected


def _ranges(firsts: IntArray, counts: IntArray) -> IntArray:
    """The numbers of several ranges, one range after another: range i has `counts[i]` numbers from `firsts[i]` on."""
    shifts = np.repeat(firsts - np.cumsum(counts) + counts, counts)
    return shifts + np.arange(len(shifts), dtype=np.int64)

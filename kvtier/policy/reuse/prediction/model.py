"""The model of a stack that `reuse` decides by: one set of life tables and one time for all of its tiers."""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from kvtier.policy.base import RequestModel
from kvtier.policy.reuse.prediction.classes import BUCKET_BOUNDS, NUM_BUCKETS, NUM_CLASSES, USES, bucket_of
from kvtier.policy.reuse.prediction.life_tables import FloatArray, LifeTables
from kvtier.policy.reuse.prediction.prompts import Prompts
from kvtier.policy.reuse.prediction.segments import Segments
from kvtier.types.keys import GroupIndex, OffloadKey, RequestId
from kvtier.types.requests import RequestUse

RECOMPUTE_SECONDS = 300.0
FIRST_RECOMPUTE_SECONDS = 30.0
VERSION = b"kvtier reuse 3\n"
FOLLOWED = b"\x01"
"""A byte for earlier releases, which began in LRU's order where it was 0. It is not read any more."""
USE_SECONDS = 1e-6
BUCKETS_DESCRIBED = 17
BOUNDS = np.array(BUCKET_BOUNDS)


class ReuseModel(RequestModel):
    """Time that never goes back, the life tables, and the segments that they count: those of the largest tier.

    `prompts` are kept for admissions; the tables count those where no tier has segments.
    """

    NAME: ClassVar[str] = "reuse"

    def __init__(self) -> None:
        self.tables = LifeTables()
        self.now = 0.0
        self._started: float | None = None
        self._computed = 0.0
        self._due = 0.0
        self._counted: Segments | None = None
        self._counted_used = False
        self.prompts: Prompts | None = None

    def keep_prompts(self) -> Prompts:
        """The prompts by which an admission finds the classes of blocks: kept from the next request on."""
        if self.prompts is None:
            self.prompts = Prompts(self.count_ended, self.count_cut)
        return self.prompts

    def count_lives(self, segments: Segments) -> None:
        """Count the open lives of these segments, unless a larger tier's count. Each tier calls it at every use."""
        spare = self.prompts is not None and self._counted is self.prompts.segments
        if self._counted is None or spare or segments.capacity > self._counted.capacity:
            self._counted = segments
        self._counted_used = self._counted_used or segments is self._counted

    def count_ended(self, segments: Segments, seg: int, gap: float) -> None:
        """Count a life that ended: its segment was used again, `gap` seconds after its last use."""
        if segments.counts[seg] and segments is self._counted:
            self.tables.ended[segments.kind[seg] * NUM_BUCKETS + bucket_of(gap)] += 1.0

    def count_cut(self, segments: Segments, seg: int) -> None:
        """Count a life that is cut: its segment is dropped, and may be used again or not."""
        if segments.counts[seg] and segments is self._counted:
            bucket = bucket_of(self.now - segments.touched[seg])
            self.tables.cut[segments.kind[seg] * NUM_BUCKETS + bucket] += 1.0

    def begin_request(self, use: RequestUse) -> None:
        self.advance(use.time)
        # Uses at one time keep their order.
        self.now += USE_SECONDS
        if not self._counted_used:  # its tier was held back
            self._counted = None
        self._counted_used = False
        if self.prompts is not None:
            if self._counted is None:
                self._counted = self.prompts.segments
            self.prompts.begin_request(use.request_id, use.group, use.keys, self.now)

    def extend_request(self, request_id: RequestId, group: GroupIndex, keys: Sequence[OffloadKey]) -> None:
        if self.prompts is not None:
            self.prompts.extend_request(request_id, group, keys)

    def end_request(self, request_id: RequestId, output_tokens: int | None) -> None:
        if self.prompts is not None:
            self.prompts.end_request(request_id, output_tokens)

    def advance(self, time: float) -> None:
        if self._started is None:
            self._started = self._computed = self.now = time
            self._due = time + FIRST_RECOMPUTE_SECONDS
        if time > self.now:
            self.now = time
        if self.now >= self._due:
            self._recompute()

    def _recompute(self) -> None:
        assert self._started is not None
        self.tables.decay((self.now - self._computed) / 60.0)
        self.tables.recompute(self._open_lives())
        self._computed = self.now
        self._due = self.now + min(RECOMPUTE_SECONDS, max(FIRST_RECOMPUTE_SECONDS, self.now - self._started))

    def _open_lives(self) -> FloatArray:
        cells = NUM_CLASSES * NUM_BUCKETS
        if self._counted is None or not self._counted.used:
            return np.zeros(cells)
        known = self._counted
        kinds, ages = known.lives(self.now)
        return np.bincount(kinds * NUM_BUCKETS + np.searchsorted(BOUNDS, ages, "right"), minlength=cells).astype(float)

    def save(self) -> bytes:
        counts = np.concatenate([np.array(self.tables.ended), np.array(self.tables.cut) + self._open_lives()])
        return VERSION + FOLLOWED + zlib.compress(counts.astype("<f4").tobytes())

    def restore(self, saved: bytes) -> None:
        size = 2 * NUM_CLASSES * NUM_BUCKETS
        if not saved.startswith(VERSION):
            raise ValueError("these are no life tables of this version")
        try:
            counts = np.frombuffer(_inflate(saved[len(VERSION + FOLLOWED) :], 4 * size), "<f4").astype(np.float64)
        except zlib.error as error:
            raise ValueError(f"broken life tables: {error}") from None
        if len(counts) != size or not np.isfinite(counts).all() or (counts < 0).any():
            raise ValueError("broken life tables: these are no counts of lives")
        self.tables.ended = array("d", counts[: size // 2].tobytes())
        self.tables.cut = array("d", counts[size // 2 :].tobytes())
        self.tables.recompute(np.zeros(size // 2))

    def describe(self) -> Sequence[str]:
        hits, shares = self.tables.returns(BUCKETS_DESCRIBED, self._open_lives())
        within = int(BOUNDS[BUCKETS_DESCRIBED - 1])
        return [
            f"after {name} use a prompt comes back within {within} s in {share:.0%} ({count:,.0f} returns seen)"
            if count
            else f"after {name} use no prompt was seen to come back"
            for name, count, share in zip(USES, hits, shares, strict=True)
        ]


def _inflate(packed: bytes, size: int) -> bytes:
    stream = zlib.decompressobj()
    return stream.decompress(packed, size) + stream.decompress(stream.unconsumed_tail, 1)

"""Admission: which blocks are written to a lower tier. The control plane decides by it and by nothing else.

A block is a candidate when it became ready in a row. A block that is not admitted then is a candidate again at its next
use, as long as its row holds it. A tier without an admission takes every block.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterable, Sequence

from xxhash import xxh3_64_intdigest

from kvtier.options import ADMISSION_BYTES
from kvtier.types.keys import OffloadKey

WAYS = 8
"""First uses that share a bucket."""


class Admission(ABC):
    """The rule of one tier. Synchronous and deterministic, without a clock."""

    @abstractmethod
    def admits(self, key: OffloadKey, used_again: bool, holds: Callable[[OffloadKey], bool]) -> bool:
        """True if the tier is to be sent this block. `holds` is true of the blocks that the tier has.

        `used_again`: this is not the block's first use for certain, because it was loaded, or stored while its row held
        it. Otherwise it was stored, and whether for the first time is for the admission to remember. Blocks of a prompt
        come leaf first.
        """

    @abstractmethod
    def parents(self, key: OffloadKey) -> Iterable[OffloadKey]:
        """Blocks without which this one is not reachable, the nearest first: they are written with it."""

    @abstractmethod
    def on_evict(self, keys: Sequence[OffloadKey]) -> None:
        """The tier has these blocks no longer."""

    @property
    @abstractmethod
    def computed_again(self) -> int:
        """Blocks that came again from the engine after they were not admitted: the hits that it cost."""


class SecondUse(Admission):
    """Admission of a block at its second use. Most writes of blocks that were used once are wasted.

    First uses are remembered as fingerprints of 32 bits in `num_bytes` of memory, taken at once: 1,048,576 of them in
    4 MiB. A new one takes the place of the oldest of the eight in its bucket. A block that was never seen counts as
    seen with a probability of at most 8 / 2^32 (2e-9); it is written too early then, and nothing else. A reset
    forgets nothing: how often a prompt comes does not depend on the weights.
    """

    def __init__(self, num_bytes: int = ADMISSION_BYTES) -> None:
        self._fingerprints = array("I", bytes(num_bytes))
        self._buckets = len(self._fingerprints) // WAYS
        self._again = 0

    def admits(self, key: OffloadKey, used_again: bool, holds: Callable[[OffloadKey], bool]) -> bool:
        if used_again:
            return True
        first = self._first(key)
        self._again += not first
        return not first

    def parents(self, key: OffloadKey) -> Iterable[OffloadKey]:
        return ()

    def on_evict(self, keys: Sequence[OffloadKey]) -> None:
        """Do nothing: a second use does not depend on what is kept."""

    @property
    def computed_again(self) -> int:
        return self._again

    def _first(self, key: OffloadKey) -> bool:
        """True if the key is not remembered; from now on it is."""
        high, low = divmod(xxh3_64_intdigest(key), 1 << 32)
        fingerprint, start = high or 1, low % self._buckets * WAYS
        bucket = self._fingerprints[start : start + WAYS]
        if fingerprint in bucket:
            return False
        self._fingerprints[start : start + WAYS] = bucket[1:] + array("I", (fingerprint,))
        return True

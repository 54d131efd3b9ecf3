"""Admission: which blocks are written to a lower tier. The control plane asks here and nowhere else.

A block is a candidate when it became ready in a row. A tier that does not admit it then is asked again when the block
is used once more, as long as its row holds it. A tier without an admission takes every block.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Collection, Iterable, Sequence

from xxhash import xxh3_64_intdigest

from kvtier.options import ADMISSION_BYTES
from kvtier.types.keys import OffloadKey

WAYS = 8
"""First uses that share a bucket."""


class Admission(ABC):
    """What decides for one tier. Synchronous and deterministic, without a clock."""

    @abstractmethod
    def admits(self, key: OffloadKey, used_again: bool, holds: Callable[[OffloadKey], bool]) -> bool:
        """True if the tier is to be sent this block. `holds` says which blocks the tier has.

        `used_again`: this is not the block's first use for certain, because it was loaded, or stored while its row held
        it. Otherwise it was stored, and whether for the first time is for the admission to remember. Blocks of a prompt
        are asked for leaf first.
        """

    @abstractmethod
    def parents(self, key: OffloadKey) -> Iterable[OffloadKey]:
        """The blocks without which this one is not reachable, the nearest first: they are written with it."""

    @abstractmethod
    def evicted(self, keys: Sequence[OffloadKey]) -> None:
        """The tier has these blocks no more."""

    @abstractmethod
    def admit_parent(self, key: OffloadKey) -> None:
        """This block is to be sent although it was not admitted before: it is one of `parents` of one that was."""

    @abstractmethod
    def affordable(
        self, keys: Sequence[OffloadKey], holds: Callable[[OffloadKey], bool], waits: Callable[[OffloadKey], bool]
    ) -> Collection[OffloadKey]:
        """Those of the blocks, given leaf first, that may be sent now, as far as writes are limited.

        `holds` says which blocks the tier has or is being sent, `waits` which are to be sent.
        """

    @abstractmethod
    def sent(self, keys: Sequence[OffloadKey]) -> None:
        """These blocks are being written."""

    def given_up(self, keys: Sequence[OffloadKey]) -> None:  # noqa: B027 (only where writes are limited)
        """These blocks are not written after all."""

    @property
    @abstractmethod
    def computed_again(self) -> int:
        """Blocks that came again from the engine after they were not admitted: the hits that it cost."""


class LateAdmission(Admission):
    """An admission that may decide as the CPU tier is about to evict a block, and not when it was stored."""

    @abstractmethod
    def offered(self, keys: Sequence[OffloadKey]) -> None:
        """These blocks were stored. Whether they are written will be asked with `evicting`."""

    @abstractmethod
    def evicting(
        self, key: OffloadKey, holds: Callable[[OffloadKey], bool], stuck: Callable[[OffloadKey], bool]
    ) -> Sequence[OffloadKey]:
        """The blocks to send now because this one is about to be evicted, leaf first: it and those of `parents` that
        the tier lacks, or some of them from the root on. `stuck` blocks cannot be sent now."""


class SecondUse(Admission):
    """Admits a block at its second use. What was used once is written in vain more often than not.

    First uses are remembered as fingerprints of 32 bits in `num_bytes` of memory, taken at once: 1,048,576 of them in
    4 MiB. A new one takes the place of the oldest of the eight in its bucket. A block that was never seen is taken for
    one that was with a probability of at most 8 / 2^32 (2e-9); it is written too early then, and nothing else. A reset
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

    def evicted(self, keys: Sequence[OffloadKey]) -> None:
        """What is kept does not matter here."""

    def admit_parent(self, key: OffloadKey) -> None:
        """There are none."""

    def affordable(
        self, keys: Sequence[OffloadKey], holds: Callable[[OffloadKey], bool], waits: Callable[[OffloadKey], bool]
    ) -> Collection[OffloadKey]:
        return keys

    def sent(self, keys: Sequence[OffloadKey]) -> None:
        """Writes are not limited here."""

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

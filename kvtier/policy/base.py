"""The contract of eviction policies: order only, no bytes and no keys of their own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import ClassVar

from kvtier.types.keys import GroupIndex, OffloadKey, RequestId
from kvtier.types.requests import RequestUse

MODEL_BYTES_MAX = 4 << 20
"""Bytes that a model may save, at most."""


class EvictionPolicy(ABC):
    """Order in which ready slots are evicted. In batches of slot numbers; without state, clock or randomness.

    `keys[slot]` is the tier's own list: valid for a slot from `insert` until after `evict` or `remove` returned.
    Slots are given in access order, the leaf of a request before its root, so a parent never ages before its children.
    """

    @abstractmethod
    def __init__(self, num_slots: int, keys: Sequence[OffloadKey | None]) -> None: ...

    @abstractmethod
    def admit(self, keys: Sequence[OffloadKey]) -> None:
        """Prepare for keys that missed and are about to be placed, in access order. Called before `evict`."""

    @abstractmethod
    def insert(self, slots: Sequence[int]) -> None:
        """Add slots that became ready; the last one is the most recent."""

    @abstractmethod
    def touch(self, slots: Sequence[int]) -> None:
        """Count a use of these ready slots; the last one is the most recent."""

    @abstractmethod
    def renew(self, slots: Sequence[int]) -> None:
        """Make these ready slots the most recent, the last one most of all; this is no use of them."""

    @abstractmethod
    def remove(self, slots: Sequence[int]) -> None:
        """Remove slots whose content is gone for good (corrupt, reset): nothing about it is remembered."""

    @abstractmethod
    def forget(self, slots: Sequence[int]) -> None:
        """Remove slots that the tier evicted by its own choice along `coldest`, as if `evict` had chosen them."""

    @abstractmethod
    def evict(self, count: int, pins: Sequence[int]) -> list[int] | None:
        """Choose and forget exactly `count` slots with `pins[slot] == 0`, or change nothing and return None."""

    @abstractmethod
    def coldest(self) -> Iterator[int]:
        """Ready slots from the coldest on, without changing anything; the policy must not change while it runs."""


class RequestModel(ABC):
    """Statistics of requests: one of its kind in a stack, shared by the policies and admissions that use it.

    It is given each use before the policies are. It has no clock and no randomness: the same calls end in the same
    state. `NAME` names the file that keeps what it has learned: at most 32 lower-case letters, digits, "-" and "_".
    """

    NAME: ClassVar[str]

    @abstractmethod
    def __init__(self) -> None: ...

    @abstractmethod
    def begin_request(self, use: RequestUse) -> None:
        """Begin a request. Its blocks are stored and loaded later, if at all, perhaps after other requests began."""

    def extend_request(  # noqa: B027 (not abstract: most have no use for it)
        self, request_id: RequestId, group: GroupIndex, keys: Sequence[OffloadKey]
    ) -> None:
        """Extend a request that began by these blocks of its output, right after those it has, in prefix order.

        They are about to be stored. Ignored unless overridden.
        """

    @abstractmethod
    def end_request(self, request_id: RequestId, output_tokens: int | None) -> None:
        """End a request, with its tokens of output; None where that is unknown, or it was aborted."""

    @abstractmethod
    def advance(self, time: float) -> None:
        """Let time pass up to here, in the time of the uses. Bounded work, however much time that is."""

    @abstractmethod
    def save(self) -> bytes:
        """Statistics as bytes, without any content: no keys, nothing of a request. At most `MODEL_BYTES_MAX`.

        The first bytes are the version that wrote it.
        """

    @abstractmethod
    def restore(self, saved: bytes) -> None:
        """Go on from what `save` returned, perhaps of another version. Called before any use.

        Raises ValueError, and changes nothing, for bytes that are not what this version reads.
        """

    @abstractmethod
    def describe(self) -> Sequence[str]:
        """Statistics in words for a person; one line each."""


class RequestPolicy(EvictionPolicy):
    """A policy that is given the requests too: time, the parents and positions of keys, and what came with them.

    `model` is of the type `MODEL`, and is given each use, end and time before the policy. Blocks may become ready that
    are in no request: those of groups that keep no chain (a sliding window), and of an embedder that announces none.
    `touch` is called only for uses that no `begin_request` comes with.

    A tier may be opened, and its policy made, in another thread than the stack's: until `insert`, `begin_request` or
    `advance` is called for the first time the policy does nothing with the model but keep it.
    """

    MODEL: ClassVar[type[RequestModel]]

    @abstractmethod
    def __init__(self, num_slots: int, keys: Sequence[OffloadKey | None], model: RequestModel) -> None: ...

    @abstractmethod
    def recover(self, slots: Sequence[int]) -> None:
        """Add slots that hold what the tier was opened with, the newest last. Called once at most, before all else."""

    @abstractmethod
    def begin_request(self, use: RequestUse, slots: Sequence[int]) -> None:
        """Begin a request. `slots[i]` is the ready slot of `use.keys[i]` in this tier, -1 where there is none."""

    def extend_request(
        self, request_id: RequestId, group: GroupIndex, keys: Sequence[OffloadKey], slots: Sequence[int]
    ) -> None:
        """See `RequestModel.extend_request`; `slots` as for `begin_request`. Ignored unless overridden."""

    @abstractmethod
    def end_request(self, request_id: RequestId, output_tokens: int | None) -> None:
        """End a request that began; see `RequestModel.end_request`."""

    @abstractmethod
    def advance(self, time: float) -> None:
        """Let time pass up to here. Called before a batch of blocks is placed. Bounded work."""

    @abstractmethod
    def bypass(self, keys: Sequence[OffloadKey], evictions: int, pins: Sequence[int]) -> Sequence[int]:
        """Keys, by index, that are worth less than what would be evicted for them. Changes nothing.

        None of the keys has a slot. They are in prefix order, perhaps of several requests; to place them all takes
        `evictions` evictions, at most as many as there are keys. What is returned is not placed: a key is not to be
        left out where a child of it is kept, here or in the tier.
        """

    @property
    def admits_everything(self) -> bool:
        """True if `bypass` would leave out nothing, whatever the keys, until the next request begins."""
        return False

    def preselect(self, count: int, pins: Sequence[int]) -> Sequence[int]:
        """Choose and forget at most `count` slots with `pins[slot] == 0`, those that are easily found.

        It is ahead of need: they stay ready until a block needs a slot, and one that is used before that is inserted
        again, after that use.
        """
        return self.evict(count, pins) or ()

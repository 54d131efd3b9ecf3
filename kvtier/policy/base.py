"""The contract of eviction policies: order only, no bytes and no keys of their own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import ClassVar

from kvtier.types.keys import GroupIndex, OffloadKey, RequestId
from kvtier.types.requests import RequestUse

MODEL_BYTES_MAX = 4 << 20
"""The most that a model may save."""


class EvictionPolicy(ABC):
    """Decides which ready slot goes first. Works on slot numbers in batches; knows no state, no clock, no randomness.

    `keys[slot]` is the tier's own list: valid for a slot from `insert` until after `evict` or `remove` returned.
    Slots are given in access order, the leaf of a request before its root, so a parent never ages before its children.
    """

    @abstractmethod
    def __init__(self, num_slots: int, keys: Sequence[OffloadKey | None]) -> None: ...

    @abstractmethod
    def admit(self, keys: Sequence[OffloadKey]) -> None:
        """These keys missed and are about to be placed, in access order. Called before `evict` makes room for them."""

    @abstractmethod
    def insert(self, slots: Sequence[int]) -> None:
        """These slots became ready; the last one is the most recent."""

    @abstractmethod
    def touch(self, slots: Sequence[int]) -> None:
        """These ready slots were used; the last one is the most recent."""

    @abstractmethod
    def renew(self, slots: Sequence[int]) -> None:
        """These ready slots are the most recent after all, the last one most of all; this is no use of them."""

    @abstractmethod
    def remove(self, slots: Sequence[int]) -> None:
        """These slots' content is gone for good (corrupt, reset): nothing about it is remembered."""

    @abstractmethod
    def forget(self, slots: Sequence[int]) -> None:
        """These slots were evicted by the tier's own choice along `coldest`, as if `evict` had chosen them."""

    @abstractmethod
    def evict(self, count: int, pins: Sequence[int]) -> list[int] | None:
        """Choose and forget exactly `count` slots with `pins[slot] == 0`, or change nothing and return None."""

    @abstractmethod
    def coldest(self) -> Iterator[int]:
        """Ready slots from the coldest on, without changing anything; the policy must not change while it runs."""


class RequestModel(ABC):
    """What is learned from requests: one of its kind in a stack, shared by the policies and admissions that ask it.

    It is given each use before the policies are. It knows no clock and no randomness: the same calls end in the same
    state. `NAME` names the file that keeps what it has learned: at most 32 lower-case letters, digits, "-" and "_".
    """

    NAME: ClassVar[str]

    @abstractmethod
    def __init__(self) -> None: ...

    @abstractmethod
    def begin_request(self, use: RequestUse) -> None:
        """A request begins. Its blocks are stored and loaded later, if at all, perhaps after other requests began."""

    def extend_request(  # noqa: B027 (not abstract: most have no use for it)
        self, request_id: RequestId, group: GroupIndex, keys: Sequence[OffloadKey]
    ) -> None:
        """A request that began goes on with these blocks of its output, right after those it has, in prefix order.

        They are about to be stored. Ignored unless overridden.
        """

    @abstractmethod
    def end_request(self, request_id: RequestId, output_tokens: int | None) -> None:
        """A request has ended, with so many tokens of output; None where that is unknown, or it was aborted."""

    @abstractmethod
    def advance(self, time: float) -> None:
        """Time has passed up to here, in the time of the uses. Bounded work, however much time that is."""

    @abstractmethod
    def save(self) -> bytes:
        """What was learned, without any content: no keys, nothing of a request. At most `MODEL_BYTES_MAX`.

        The first bytes say which version wrote it.
        """

    @abstractmethod
    def restore(self, saved: bytes) -> None:
        """Go on from what `save` returned, perhaps of another version. Called before any use.

        Raises ValueError, and changes nothing, for bytes that are not what this version reads.
        """

    @abstractmethod
    def describe(self) -> Sequence[str]:
        """What was learned, in words for a person; one line each."""


class RequestPolicy(EvictionPolicy):
    """A policy that is given the requests too: time, the parents and positions of keys, and what came with them.

    `model` is of the type `MODEL`, and is given each use, end and time before the policy. Blocks may become ready that
    are in no request: those of groups that keep no chain (a sliding window), and of an embedder that announces none.
    `touch` is called only for uses that no `begin_request` comes with.

    Calls that only tell it something (`admit`, `insert`, `touch`, `renew`, requests, time) may come later than that
    happened, but in their order, and before the policy is asked anything or loses a slot. They may come in a second
    thread, one at a time.

    A tier may be opened, and its policy made, in another thread than the stack's: until `insert`, `begin_request` or
    `advance` is called for the first time the policy does nothing with the model but keep it.
    """

    MODEL: ClassVar[type[RequestModel]]

    @abstractmethod
    def __init__(self, num_slots: int, keys: Sequence[OffloadKey | None], model: RequestModel) -> None: ...

    @abstractmethod
    def recover(self, slots: Sequence[int]) -> None:
        """These slots hold what the tier was opened with, the newest last. Called once at most, before all else."""

    @abstractmethod
    def begin_request(self, use: RequestUse, slots: Sequence[int]) -> None:
        """A request begins. `slots[i]` is the ready slot of `use.keys[i]` in this tier, -1 where there is none."""

    def extend_request(
        self, request_id: RequestId, group: GroupIndex, keys: Sequence[OffloadKey], slots: Sequence[int]
    ) -> None:
        """See `RequestModel.extend_request`; `slots` as for `begin_request`. Ignored unless overridden."""

    @abstractmethod
    def end_request(self, request_id: RequestId, output_tokens: int | None) -> None:
        """A request that began has ended; see `RequestModel.end_request`."""

    @abstractmethod
    def advance(self, time: float) -> None:
        """Time has passed up to here. Called before a batch of blocks is placed. Bounded work."""

    @abstractmethod
    def bypass(self, keys: Sequence[OffloadKey], evictions: int, pins: Sequence[int]) -> Sequence[int]:
        """Which of these keys, by index, are worth less than what would be evicted for them. Changes nothing.

        None of the keys has a slot. They are in prefix order, perhaps of several requests; to place them all takes
        `evictions` evictions, at most as many as there are keys. What is returned is not placed: a key is not to be
        left out where a child of it is kept, here or in the tier.
        """

    @property
    def places_all(self) -> bool:
        """True if `bypass` would leave out nothing, whatever it is asked, until the next request begins."""
        return False

    def evict_some(self, count: int, pins: Sequence[int]) -> Sequence[int]:
        """Choose and forget at most `count` slots with `pins[slot] == 0`, those that are easily found.

        It is ahead of need: they stay ready until a block needs a slot, and one that is used before that is inserted
        again, after that use.
        """
        return self.evict(count, pins) or ()

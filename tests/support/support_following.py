"""A policy that follows requests as simply as can be: LRU that writes down what it is told."""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.policy import LRU, RequestModel, RequestPolicy
from kvtier.types.keys import GroupIndex, OffloadKey, RequestId
from kvtier.types.requests import RequestUse


class Notes(RequestModel):
    """`calls` has every call in its order. What it saves is how many requests began."""

    NAME = "notes"

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []
        self.begun = 0

    def begin_request(self, use: RequestUse) -> None:
        self.begun += 1
        self.calls.append(("begin", use))

    def extend_request(self, request_id: RequestId, group: GroupIndex, keys: Sequence[OffloadKey]) -> None:
        self.calls.append(("extend", request_id, group, list(keys)))

    def end_request(self, request_id: RequestId, output_tokens: int | None) -> None:
        self.calls.append(("end", request_id, output_tokens))

    def advance(self, time: float) -> None:
        self.calls.append(("advance", time))

    def save(self) -> bytes:
        return b"notes 1 %d" % self.begun

    def restore(self, saved: bytes) -> None:
        if not saved.startswith(b"notes 1 "):
            raise ValueError("these are no notes of version 1")
        self.begun = int(saved.removeprefix(b"notes 1 "))

    def describe(self) -> Sequence[str]:
        return [f"{self.begun} requests began"]

    def told(self, what: str) -> list[tuple[object, ...]]:
        """The calls of one kind, in their order."""
        return [call[1:] for call in self.calls if call[0] == what]

    @property
    def uses(self) -> list[RequestUse]:
        return [use for (use,) in self.told("begin") if isinstance(use, RequestUse)]


class FollowingLRU(LRU, RequestPolicy):
    """`unwanted` are the keys it would rather not place."""

    MODEL = Notes

    def __init__(self, num_slots: int, keys: Sequence[OffloadKey | None], model: RequestModel) -> None:
        LRU.__init__(self, num_slots, keys)
        assert isinstance(model, Notes)
        self.model = model
        self.slots: list[list[int]] = []
        self.recovered: list[int] = []
        self.touched: list[int] = []
        self.unwanted: set[OffloadKey] = set()

    def recover(self, slots: Sequence[int]) -> None:
        self.recovered += slots
        self.insert(slots)

    def begin_request(self, use: RequestUse, slots: Sequence[int]) -> None:
        self.slots.append(list(slots))
        LRU.touch(self, [slot for slot in reversed(slots) if slot >= 0])

    def end_request(self, request_id: RequestId, output_tokens: int | None) -> None:
        pass

    def advance(self, time: float) -> None:
        pass

    def touch(self, slots: Sequence[int]) -> None:
        self.touched += slots
        LRU.touch(self, slots)

    def bypass(self, keys: Sequence[OffloadKey], evictions: int, pins: Sequence[int]) -> Sequence[int]:
        return [index for index, key in enumerate(keys) if key in self.unwanted][:evictions]

"""A tier around `policy: reuse`, driven as the control plane does it, and prompts for it."""

from __future__ import annotations

from kvtier.policy import RequestModels, make_policy
from kvtier.policy.reuse.policy import Reuse
from kvtier.policy.reuse.prediction.model import ReuseModel
from kvtier.types.keys import GroupIndex, OffloadKey, RequestId, make_key
from kvtier.types.requests import RequestUse


class Tier:
    """A tier of `num_slots` slots around the policy, as the control plane drives it."""

    def __init__(self, num_slots: int, models: RequestModels | None = None) -> None:
        self.keys: list[OffloadKey | None] = [None] * num_slots
        self.models = models or RequestModels()
        policy = make_policy("reuse", num_slots, self.keys, self.models)
        assert isinstance(policy, Reuse)
        self.policy = policy
        self.model = self.models.of(ReuseModel)
        self.slots: dict[OffloadKey, int] = {}
        self.free = list(range(num_slots))
        self.pins = bytearray(num_slots)
        self.requests = 0

    def begin(self, keys: list[OffloadKey], time: float) -> int:
        """A request begins; returns the blocks of its prefix that are here."""
        self.requests += 1
        slots = [self.slots.get(key, -1) for key in keys]
        use = RequestUse(RequestId(str(self.requests)), time, keys, GroupIndex(0), slots.count(-1))
        self.model.advance(time)
        self.model.begin_request(use)
        self.policy.begin_request(use, slots)
        return slots.index(-1) if -1 in slots else len(slots)

    def extend(self, keys: list[OffloadKey]) -> None:
        """The last request goes on."""
        slots = [self.slots.get(key, -1) for key in keys]
        self.model.extend_request(RequestId(str(self.requests)), GroupIndex(0), keys)
        self.policy.extend_request(RequestId(str(self.requests)), GroupIndex(0), keys, slots)

    def end(self, output_tokens: int | None = None) -> None:
        """The last request ends."""
        self.policy.end_request(RequestId(str(self.requests)), output_tokens)

    def store(self, keys: list[OffloadKey], bypass: bool = True) -> None:
        """Place those of the keys that are not here, as far as they are worth it and there is room."""
        missing = [key for key in keys if key not in self.slots]
        need = len(missing) - len(self.free)
        if need > 0 and bypass:
            out = set(self.policy.bypass(missing, need, self.pins))
            missing = [key for index, key in enumerate(missing) if index not in out]
        self.policy.admit(missing[::-1])
        need = len(missing) - len(self.free)
        if need > 0:
            victims = self.policy.evict(need, self.pins)
            if victims is None:
                return
            self.free_slots(victims)
        slots = [self.free.pop() for _ in missing]
        for slot, key in zip(slots, missing, strict=True):
            self.keys[slot], self.slots[key] = key, slot
        self.policy.insert(slots[::-1])

    def free_slots(self, slots: list[int]) -> None:
        for slot in slots:
            key = self.keys[slot]
            assert key is not None
            assert not self.pins[slot]
            del self.slots[key]
            self.keys[slot] = None
        self.free += slots

    def serve(self, keys: list[OffloadKey], time: float, output_tokens: int = 50) -> int:
        hits = self.begin(keys, time)
        self.store(keys)
        self.end(output_tokens)
        return hits

    def check(self) -> None:
        order = list(self.policy.coldest())
        assert len(order) == len(set(order))
        assert set(order) == set(self.slots.values())
        segments = self.policy._tree.segments
        held = [seg for seg in range(segments.used) if segments.held[seg]]
        assert sum(segments.held[seg] for seg in held) + self.policy._tree.num_untracked == len(self.slots)
        kids = [0] * segments.capacity
        for seg in held:
            if segments.parent[seg] >= 0:
                kids[segments.parent[seg]] += 1
        assert kids == segments.kids.tolist()
        for seg in held:
            assert segments.held[seg] <= segments.length[seg]
            places = [self.policy._tree.position[slot] for slot in self.policy._tree.slots_of(seg)]
            assert places == sorted(set(places), reverse=True)


def prompt(*numbers: int) -> list[OffloadKey]:
    """Keys whose n-th names the first n numbers."""
    return [make_key(repr(numbers[: size + 1]).encode(), 0) for size in range(len(numbers))]


def chat(session: int, blocks: int) -> list[OffloadKey]:
    return [make_key(f"{session}:{block}".encode(), 0) for block in range(blocks)]

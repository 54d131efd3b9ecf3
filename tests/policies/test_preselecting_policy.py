"""A policy whose victims are chosen ahead has all slots at all times, whatever happens to them."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from support_counts import seeds
from support_following import FollowingLRU

from kvtier.policy import RequestModels, make_policy
from kvtier.policy.reuse.preselecting_policy import PreselectingPolicy
from kvtier.types.keys import GroupIndex, OffloadKey, RequestId, make_key
from kvtier.types.requests import NO_INFO, RequestUse

SLOTS, STEPS = 96, 1500
GROUP = GroupIndex(0)


class Tier:
    """Slots in miniature: prompts that begin and grow, fills, pins, drops, and evictions."""

    def __init__(self, seed: int) -> None:
        models = RequestModels(["reuse"])
        self.rng, self.models = random.Random(seed), models
        self.keys: list[OffloadKey | None] = [None] * SLOTS
        self.pins = bytearray(SLOTS)
        self.slots: dict[OffloadKey, int] = {}
        self.free = list(range(SLOTS))
        self.policy = PreselectingPolicy(make_policy("reuse", SLOTS, self.keys, models), SLOTS)
        self.time, self.evicted = 0.0, list[int]()
        self.open: dict[RequestId, list[OffloadKey]] = {}

    def prompt(self) -> list[OffloadKey]:
        document, own = self.rng.randrange(14), self.rng.randrange(1 << 40)
        names = [f"{document}/{at}" for at in range(self.rng.randrange(1, 10))]
        return [make_key(name.encode(), 0) for name in names + [f"{own}.{at}" for at in range(self.rng.randrange(4))]]

    def begin(self) -> None:
        self.time += self.rng.random() * 20
        request, keys = RequestId(str(self.time)), self.prompt()
        slots = [self.slots.get(key, -1) for key in keys]
        use = RequestUse(request, self.time, keys, GROUP, slots.count(-1), NO_INFO)
        for model in self.models:
            model.advance(self.time)
            model.begin_request(use)
        self.policy.begin_request(use, slots)
        self.open[request] = list(keys)
        self.fill(keys)

    def extend(self) -> None:
        if self.open:
            request = self.rng.choice(list(self.open))
            fresh = [make_key(f"{request}+{len(self.open[request])}".encode(), 0)]
            self.policy.extend_request(request, GROUP, fresh, [-1])
            self.open[request] += fresh
            self.fill(fresh)

    def end(self) -> None:
        if len(self.open) > 4:
            request = next(iter(self.open))
            del self.open[request]
            self.policy.end_request(request, self.rng.randrange(900))

    def fill(self, keys: list[OffloadKey]) -> None:
        absent = [key for key in keys if key not in self.slots]
        self.policy.admit(absent[::-1])
        lacking = len(absent) - len(self.free)
        if lacking > 0 and not self.evict(lacking):
            return
        taken = [self.free.pop() for _ in absent]
        for slot, key in zip(taken, absent, strict=True):
            self.keys[slot], self.slots[key] = key, slot
        self.policy.insert(taken[::-1])

    def evict(self, count: int) -> bool:
        victims = self.policy.evict(count, self.pins)
        self.evicted += victims if victims is not None else [-1]
        for slot in victims or ():
            assert not self.pins[slot]
            self.lose(slot)
        return victims is not None

    def lose(self, slot: int) -> None:
        key = self.keys[slot]
        assert key is not None, "a slot goes once"
        del self.slots[key]
        self.keys[slot] = None
        self.free.append(slot)

    def drop(self) -> None:
        some = self.rng.sample(list(self.slots.values()), min(2, len(self.slots)))
        (self.policy.remove if self.rng.random() < 0.5 else self.policy.forget)(some)
        for slot in some:
            self.lose(slot)

    def use(self) -> None:
        some = self.rng.sample(list(self.slots.values()), min(3, len(self.slots)))
        (self.policy.touch if self.rng.random() < 0.5 else self.policy.renew)(some)

    def pin(self) -> None:
        share = self.rng.choice((0.0, 0.3, 0.98))
        self.pins = bytearray(self.rng.random() < share for _ in range(SLOTS))


def play(seed: int) -> tuple[list[int], list[int]]:
    """What was evicted, step by step, and the order of the slots at the end."""
    tier = Tier(seed)
    steps = (tier.begin, tier.begin, tier.extend, tier.extend, tier.end, tier.drop, tier.use, tier.pin)
    for _ in range(STEPS):
        tier.rng.choice(steps)()
        assert len(list(tier.policy.coldest())) == len(tier.slots)
    order = list(tier.policy.coldest())
    assert sorted(order) == sorted(tier.slots.values())
    return tier.evicted, order


@pytest.mark.parametrize("seed", seeds(6, 2))
def test_every_slot_is_evicted_once_or_in_its_order(seed: int) -> None:
    evicted, _ = play(seed)
    assert len(evicted) > SLOTS
    assert -1 in evicted


class PlacesAll(FollowingLRU):
    """`asked` counts the questions."""

    asked = 0

    @property
    def admits_everything(self) -> bool:
        return True

    def bypass(self, keys: Sequence[OffloadKey], evictions: int, pins: Sequence[int]) -> Sequence[int]:
        self.asked += 1
        return ()


def test_a_policy_that_places_all_is_not_asked() -> None:
    models, keys = RequestModels([PlacesAll]), [make_key(b"a", 0)]
    policy = PlacesAll(4, [None] * 4, models.of(PlacesAll.MODEL))
    assert PreselectingPolicy(policy, 4).bypass(keys, 1, bytes(4)) == ()
    assert policy.asked == 0

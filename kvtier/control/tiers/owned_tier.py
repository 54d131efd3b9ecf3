"""An owned tier: the places of keys, the states of slots, and the order of eviction."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvtier.control.tiers.placement import Placement
from kvtier.control.tiers.retained_slots import RetainedSlots
from kvtier.control.tiers.reuse_times import ReuseTimes
from kvtier.control.tiers.slot_table import FILLING, FREE, LENT, QUARANTINED, READY, RETIRED, SlotTable
from kvtier.control.tiers.tier_index import TierIndex
from kvtier.errors import IntegrityError
from kvtier.policy import EvictionPolicy, RequestModels, RequestPolicy, make_policy
from kvtier.tier.block_age import BlockAges
from kvtier.tier.contract import Recovered, SlotSpace
from kvtier.types.keys import OffloadKey, key_group

if TYPE_CHECKING:
    from kvtier.control.tiers.size_curve import SizeCurve
    from kvtier.policy.reuse.preselecting_policy import PreselectingPolicy

ERRORS_TO_RETIRE = 2


class OwnedTier(TierIndex):
    """Directory, slots and eviction of a tier whose placement belongs to the control plane.

    `request_policy` is the policy if it follows requests; it shares a model in `models` with those of other tiers.
    Where blocks have `ages`, new generations are times. `curve` has the hits of other sizes, if counted. `uses` has the
    times at which slots were used; its time is set by the control plane.
    """

    def __init__(
        self,
        name: str,
        space: SlotSpace,
        policy: str | type[EvictionPolicy],
        models: RequestModels | None = None,
        ages: BlockAges | None = None,
    ) -> None:
        super().__init__(name)
        self.space = space
        self.table = SlotTable(space.num_slot_ids, int if ages is None else ages.now_ns)
        self.pin = self.table.pin  # type: ignore[method-assign]  # pins are many: no call between
        self.placement = Placement(space, self.table)
        models = models or RequestModels()
        self.policy = make_policy(policy, space.num_slot_ids, self.table.keys, models)
        self.request_policy: PreselectingPolicy | None = None
        if isinstance(self.policy, RequestPolicy):
            from kvtier.policy.reuse.preselecting_policy import PreselectingPolicy

            of_one_size = space.num_slot_ids if self.placement.one_size else 0
            self.policy = self.request_policy = PreselectingPolicy(self.policy, of_one_size)
        self.retained = RetainedSlots(self.table, self.policy, space.slot_bytes)
        self.directory: dict[OffloadKey, int] = {}
        self.evictions = 0
        self.expired = 0
        self.peak_bytes = 0
        self.curve: SizeCurve | None = None
        self.uses = ReuseTimes(space.num_slot_ids)
        self._errors: dict[int, int] = {}

    # -- opening -------------------------------------------------------------------------------------------------

    def restore(self, recovered: Recovered) -> None:
        """Take over what the backend found in itself; the newest generation becomes the most recent."""
        self.placement.restore(recovered.formats)
        self.placement.set_aside(recovered.foreign)
        table = self.table
        slots = recovered.slots.tolist()
        if not slots:
            return
        keys = recovered.keys
        by_size: dict[int, list[int]] = {}
        for key, slot in zip(keys, slots, strict=True):
            size = self._size_of(key)
            if self.placement.region_size[self.placement.region_of(slot)] != size or key in self.directory:
                raise IntegrityError(f"{self.name}: recovered slot {slot} does not fit its region, or its key twice")
            self.directory[key] = slot
            by_size.setdefault(size, []).append(slot)
        for size, taken in by_size.items():
            self.placement.occupy(size, taken)
        table.begin_fill(slots, keys)
        table.set_generations(slots, recovered.generations.tolist())
        self.commit(slots, recovered=True)
        self._note_peak()

    def _size_of(self, key: OffloadKey) -> int:
        return self.placement.size_of_group[key_group(key)]

    # -- filling -------------------------------------------------------------------------------------------------

    def reserve(self, keys: Sequence[OffloadKey], limits: list[int] | None = None) -> list[int]:
        """FILLING slots for the front of `keys`, as many as can be had; none of the keys may be in the directory.

        Evicts what the policy offers, all that this needs or nothing. With several slot sizes a run of one size at a
        time is served, so the result is always for a contiguous front. `limits`: at most so many slots of each root,
        used up; then it evicts in those roots what it can.
        """
        if self.placement.one_size:
            return self._reserve_run(0, keys, limits)
        slots: list[int] = []
        start = 0
        while start < len(keys):
            size = self._size_of(keys[start])
            end = start + 1
            while end < len(keys) and self._size_of(keys[end]) == size:
                end += 1
            got = self._reserve_run(size, keys[start:end], limits)
            slots += got
            if len(got) < end - start:
                break
            start = end
        return slots

    def skips_bypass(self, count: int) -> bool:
        """True if so many blocks at once are placed whatever they are worth."""
        return self.request_policy is None or count < self.request_policy.bypass_min_blocks

    def keys_to_bypass(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """The keys, given in prefix order, that are worth less than what they would evict.

        None of the keys may be in the directory. Empty where the policy does not follow requests, for few blocks, and
        while there is room.
        """
        if self.skips_bypass(len(keys)) or self.placement.has_unformatted:
            return []
        if self.placement.one_size:
            return self._bypass_of_size(0, keys)
        sizes = {self._size_of(key): None for key in keys}
        of_size = ((size, [key for key in keys if self._size_of(key) == size]) for size in sizes)
        return [key for size, some in of_size for key in self._bypass_of_size(size, some)]

    def _bypass_of_size(self, size: int, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        evictions = len(keys) - self.placement.free_count[size]
        if evictions <= 0 or self.request_policy is None:
            return []
        return [keys[index] for index in self.request_policy.bypass(keys, evictions, self.table.pins)]

    def _reserve_run(self, size: int, keys: Sequence[OffloadKey], limits: list[int] | None) -> list[int]:
        room = self.placement.free_count[size] + self.table.evictable
        if len(keys) > room and self.placement.one_size and not self.placement.has_unformatted:
            keys = keys[:room]
        if not keys:
            return []
        self.policy.admit(keys[::-1])
        if limits is None:
            missing = len(keys) - self.placement.free_count[size]
            if missing > 0 and self.placement.one_size and self.placement.exhausted:
                self.evict(missing)
            slots = self.placement.take(size, len(keys))
            if len(slots) < len(keys):
                slots += self._make_room(size, len(keys) - len(slots))
        else:
            slots = self.placement.take_within(size, len(keys), limits)
            if len(slots) < len(keys) and self._evict_of_size(size, len(keys) - len(slots), list(limits)):
                slots += self.placement.take_within(size, len(keys) - len(slots), limits)
        if len(slots) < len(keys):
            keys = keys[: len(slots)]
        self.table.begin_fill(slots, keys)
        self.directory.update(zip(keys, slots, strict=True))
        if not self.placement.one_size:
            self.placement.on_use(slots)
        self._note_peak()
        return slots

    def _make_room(self, size: int, count: int) -> list[int]:
        placement = self.placement
        if placement.one_size:
            self.evict(min(count, self.table.evictable))
            return placement.take(size, count)
        slots: list[int] = []
        while len(slots) < count:
            region = placement.colder_region(size)
            if region is not None:
                self._evict_region(region)
                placement.reformat(region, size)
            elif not self._evict_of_size(size, count - len(slots)):
                break
            slots += placement.take(size, count - len(slots))
        return slots

    def evict(self, count: int) -> int:
        """Evict `count` ready slots without a pin, or none; returns how many became free."""
        victims = (self.policy.evict(count, self.table.pins) if count else None) or ()
        self._free_evicted(victims)
        return len(victims)

    def _evict_of_size(self, size: int, count: int, limits: list[int] | None = None) -> int:
        """Evict the coldest slots of a size, at most `limits[r]` of root r."""
        placement, pins = self.placement, self.table.pins
        victims: list[int] = []
        for slot in self.policy.coldest():
            region = placement.region_of(slot)
            if pins[slot] or placement.region_size[region] != size:
                continue
            if limits is not None:
                root = placement.root_of_region[region]
                if limits[root] <= 0:
                    continue
                limits[root] -= 1
            victims.append(slot)
            if len(victims) == count:
                break
        self.policy.forget(victims)
        self._free_evicted(victims)
        return len(victims)

    def _evict_region(self, region: int) -> None:
        state = self.table.state
        self.drop([slot for slot in self.placement.slots_of(region) if state[slot] == READY])

    def _free_evicted(self, victims: Sequence[int]) -> None:
        names, directory, state = self.table.keys, self.directory, self.table.state
        if not victims:
            return
        self.uses.evict(victims)
        keys: list[OffloadKey] = list(map(names.__getitem__, victims))  # type: ignore[arg-type]  # a ready slot has one
        for slot, key in zip(victims, keys, strict=True):
            if state[slot] != READY:
                raise IntegrityError(f"{self.name}: the policy evicted slot {slot}, which is not ready")
            del directory[key]
            names[slot] = None
            state[slot] = FREE
        self._changed(True).extend(keys)
        count = len(victims)
        self.table.counts[READY] -= count
        self.table.counts[FREE] += count
        self.table.evictable -= count
        self.evictions += count
        self.placement.give_back(victims)

    def commit(self, slots: Sequence[int], recovered: bool = False) -> None:
        """FILLING -> READY; ends the fill's hold. The last slot becomes the most recent. Slots quarantined meanwhile
        (by a reset) are freed instead."""
        state, pins, names = self.table.state, self.table.pins, self.table.keys
        if any(map(FILLING.__ne__, map(state.__getitem__, slots))):
            self.unpin([slot for slot in slots if state[slot] != FILLING])
            slots = [slot for slot in slots if state[slot] == FILLING]
        free_now, last, tick = 0, self.uses.last, self.uses.time.tick
        for slot in slots:
            state[slot] = READY
            last[slot] = tick
            left = pins[slot] - 1
            pins[slot] = left
            free_now += not left
        self._changed(False).extend(map(names.__getitem__, slots))  # type: ignore[arg-type]  # a ready slot has one
        if self.table.on_io_end is not None:
            self.table.on_io_end(slots)
        self.table.evictable += free_now
        self.table.counts[FILLING] -= len(slots)
        self.table.counts[READY] += len(slots)
        if not self.placement.one_size:
            self.placement.on_use(slots)
        if recovered and self.request_policy is not None:
            self.request_policy.recover(slots)
        else:
            self.policy.insert(self.retained.keep(slots) if self.retained.keys else slots)

    def abort(self, slots: Sequence[int]) -> None:
        """A fill ended without success: the slots become free, or stay quarantined while they have other pins."""
        self.quarantine(slots)
        self.unpin(slots)

    def quarantine(self, slots: Sequence[int]) -> None:
        """The fill is late or abandoned: unreachable at once, free only when its I/O has ended (`unpin`)."""
        names, state = self.table.keys, self.table.state
        for slot in slots:
            if state[slot] == FILLING:
                key = names[slot]
                if key is not None and self.directory.get(key) == slot:
                    del self.directory[key]
                names[slot] = None
                self.table.move((slot,), FILLING, QUARANTINED)

    # -- lending -------------------------------------------------------------------------------------------------

    def lend(self, count: int) -> list[int]:
        """LENT slots without a key, as many as can be had: evicts what the policy offers. Tiers of one slot size."""
        free = self.placement.free_count[0]
        if count > free:
            self.evict(min(count - free, self.table.evictable))
        slots = self.placement.take(0, min(count, self.placement.free_count[0]))
        self.table.lend(slots)
        self._note_peak()
        return slots

    def fill_lent(self, slots: Sequence[int], keys: Sequence[OffloadKey]) -> None:
        """LENT -> FILLING, for `keys[i]` in `slots[i]`, in prefix order; none of the keys may be in the directory."""
        self.policy.admit(keys[::-1])
        self.table.name_lent(slots, keys)
        self.directory.update(zip(keys, slots, strict=True))

    def end_loan(self, slots: Sequence[int]) -> None:
        """Slots that were lent have no use: free once their last pin ends (`unpin`)."""
        self.table.move(slots, LENT, QUARANTINED)

    # -- using ---------------------------------------------------------------------------------------------------

    def unpin(self, slots: Sequence[int]) -> None:
        """Remove one pin from each (`pin` adds one); quarantined slots without a pin become free."""
        if ended := self.table.unpin(slots):
            self._end_quarantine(ended)

    def _end_quarantine(self, slots: Sequence[int]) -> None:
        errors = self._errors
        bad = {slot for slot in slots if errors.get(slot, 0) >= ERRORS_TO_RETIRE} if errors else ()
        self.table.move(tuple(bad), QUARANTINED, RETIRED)
        good = [slot for slot in slots if slot not in bad] if bad else slots
        self.table.move(good, QUARANTINED, FREE)
        self.placement.give_back(good)

    def touch(self, slots: Sequence[int]) -> None:
        """These ready slots were used; the last one is the most recent."""
        self.uses.use(slots)
        self.policy.touch(self.retained.others(slots) if self.retained.slots else slots)
        if not self.placement.one_size:
            self.placement.on_use(slots)

    def reorder(self, slots: Sequence[int]) -> None:
        """These ready slots are the most recent, the last one most of all, as if they had become ready just now."""
        self.policy.renew(self.retained.others(slots) if self.retained.slots else slots)

    def presence(self, key: OffloadKey, now: float) -> bool:
        """True if the key's bytes are here."""
        slot = self.directory.get(key)
        return slot is not None and self.table.state[slot] == READY

    def needs(self, key: OffloadKey, now: float) -> bool:
        """True unless the key has a slot, filling or ready."""
        return key not in self.directory

    def needs_all(self, keys: Sequence[OffloadKey], now: float) -> bool:
        """True unless some of the keys has a slot."""
        return self.directory.keys().isdisjoint(keys)

    def slots(self, keys: Sequence[OffloadKey]) -> list[int]:
        """The slot of each key; all of them have one."""
        return list(map(self.directory.__getitem__, keys))

    def ready(self, key: OffloadKey) -> int | None:
        """The slot that holds this key's bytes, or None."""
        slot = self.directory.get(key)
        return slot if slot is not None and self.table.state[slot] == READY else None

    def ready_keys(self) -> list[OffloadKey]:
        """All keys whose bytes are here."""
        state = self.table.state
        return [key for key, slot in self.directory.items() if state[slot] == READY]

    def has(self, slot: int, generation: int) -> bool:
        """True if the slot still holds what was stored under that generation, ready."""
        return self.table.state[slot] == READY and self.table.generation[slot] == generation

    def discard(self, slot: int, generation: int) -> bool:
        """Drop a ready entry whose content was refused, unless the slot has moved on since that generation.

        A place that errs twice is retired for the session. Returns True when the entry was dropped.
        """
        if not self.has(slot, generation):
            return False
        self._errors[slot] = self._errors.get(slot, 0) + 1
        self.remove((slot,))
        return True

    def remove(self, slots: Sequence[int]) -> None:
        """Drop ready entries that are wanted no more."""
        self.policy.remove(self.retained.on_loss(slots))
        for slot in slots:
            self._unlink_ready(slot)

    def _unlink_ready(self, slot: int) -> None:
        table = self.table
        key = table.keys[slot]
        if key is not None:
            del self.directory[key]
            self._changed(True).append(key)
        table.keys[slot] = None
        table.move((slot,), READY, QUARANTINED)
        if not table.pins[slot]:
            table.evictable -= 1
            self._end_quarantine((slot,))

    def reset(self) -> None:
        """Everything becomes unreachable at once; slots still pinned are quarantined until they are unpinned."""
        state = self.table.state
        self.remove([slot for slot in range(len(state)) if state[slot] == READY])
        self.retained.remove([(key, None) for key in self.retained.keys])
        self.quarantine([slot for slot in range(len(state)) if state[slot] == FILLING])
        if self.curve is not None:
            self.curve.reset()

    def _changed(self, removed: bool) -> list[OffloadKey]:
        """The list to append changes of one kind to; a new one whenever the kind alternates, so order is kept."""
        if not self.changes or self.changes[-1][0] != removed:
            self.changes.append((removed, []))
        return self.changes[-1][1]

    def retain(self, key: OffloadKey) -> None:
        """Do not evict this key's block, which may yet come: within the bytes that `retained` allows."""
        self.retained.add(key, self.ready(key))

    def unretain(self, keys: Sequence[OffloadKey]) -> None:
        """These retained keys are ordinary again, the last of them the most recent."""
        self.retained.remove([(key, self.ready(key)) for key in keys])

    def drop(self, slots: Sequence[int]) -> None:
        """Free these ready slots, which have no pin, as if the policy had chosen them."""
        self.policy.forget(slots)
        self._free_evicted(slots)

    # -- figures -------------------------------------------------------------------------------------------------

    @property
    def available(self) -> int:
        """Slots that could be filled now: free or evictable (exact for tiers of one slot size)."""
        return self.table.counts[FREE] + self.table.evictable

    @property
    def used_bytes(self) -> int:
        """Bytes of slots that hold or receive a block."""
        return self.placement.used_bytes

    def _note_peak(self) -> None:
        placement = self.placement
        counts = self.table.counts
        filled = counts[FILLING] + counts[READY] + counts[QUARANTINED] + counts[LENT]
        used = filled * placement.sizes[0] if placement.one_size else placement.taken_bytes
        if used > self.peak_bytes:
            self.peak_bytes = used

    def check(self) -> None:
        """Raise IntegrityError unless states, directory, free lists and counters agree."""
        self.table.check()
        self.placement.check()
        reachable = self.table.counts[FILLING] + self.table.counts[READY]
        if len(self.directory) != reachable:
            raise IntegrityError(f"{self.name}: {len(self.directory)} keys for {reachable} slots")
        for key, slot in self.directory.items():
            if self.table.keys[slot] != key:
                raise IntegrityError(f"{self.name}: slot {slot} does not hold the key that points to it")
        self.retained.check()
        order = array("q", [*self.policy.coldest(), *self.retained.slots])
        if len(order) != self.table.counts[READY] or any(self.table.state[slot] != READY for slot in order):
            raise IntegrityError(f"{self.name}: the policy orders {len(order)} slots, ready {self.table.counts[READY]}")

"""The slots of one owned tier (CPU rows and disk slots alike): states, pins, generations, keys.

    ABSENT -> FREE -> FILLING -> READY -> FREE
                         |         |
                         +---------+--> QUARANTINED -> FREE | RETIRED

A pin keeps a slot from being reused: a fill in flight, a load, a demotion, a lease, or being dirty. A QUARANTINED slot
is unreachable and becomes free only when its last pin ends, never by time. ABSENT slots are ids of a region without a
format, or with a format of fewer slots. A LENT row has a pin and no key yet: an engine may fill it at any time, and
states the key afterwards (FREE -> LENT -> FILLING or QUARANTINED).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum

import numpy as np

from kvtier.errors import IntegrityError
from kvtier.types.arrays import IntArray
from kvtier.types.keys import OffloadKey


class SlotState(IntEnum):
    ABSENT = 0
    FREE = 1
    FILLING = 2
    READY = 3
    QUARANTINED = 4
    RETIRED = 5
    LENT = 6


ABSENT, FREE, FILLING, READY, QUARANTINED, RETIRED, LENT = (int(state) for state in SlotState)


class SlotTable:
    """Flat arrays indexed by slot id. Batch methods; every method keeps `counts` equal to the states.

    `generations` is a view of `generation`, for many slots at once. New ones count up, and are `now_ns()` at least.
    """

    def __init__(self, num_slot_ids: int, now_ns: Callable[[], int] = int) -> None:
        self.now_ns = now_ns
        self.state = bytearray(num_slot_ids)
        self.pins = array("I", bytes(4 * num_slot_ids))
        self.generation = array("Q", bytes(8 * num_slot_ids))
        self.generations: IntArray = np.frombuffer(self.generation, np.int64)
        self.keys: list[OffloadKey | None] = [None] * num_slot_ids
        self.counts = [0] * len(SlotState)
        self.counts[ABSENT] = num_slot_ids
        self.evictable = 0
        self.next_generation = 1
        self.on_named: Callable[[Sequence[int], Sequence[OffloadKey]], None] | None = None
        self.on_io_end: Callable[[Sequence[int]], None] | None = None

    def __len__(self) -> int:
        return len(self.state)

    def move(self, slots: Sequence[int], source: int, target: int) -> None:
        """Change the state of slots that are all in `source`. Raises IntegrityError otherwise."""
        state = self.state
        for slot in slots:
            if state[slot] != source:
                raise IntegrityError(f"slot {slot} is {SlotState(state[slot]).name}, not {SlotState(source).name}")
            state[slot] = target
        self.counts[source] -= len(slots)
        self.counts[target] += len(slots)

    def begin_fill(self, slots: Sequence[int], keys: Sequence[OffloadKey]) -> None:
        """FREE -> FILLING with a fresh generation and one pin, for `keys[i]` in `slots[i]`."""
        state, pins, generation, names = self.state, self.pins, self.generation, self.keys
        fresh = max(self.next_generation, self.now_ns())
        if self.on_named is not None:
            self.on_named(slots, keys)
        for slot, key in zip(slots, keys, strict=True):
            if state[slot] != FREE:
                raise IntegrityError(f"slot {slot} is {SlotState(state[slot]).name}, cannot be filled")
            state[slot] = FILLING
            pins[slot] = 1
            generation[slot] = fresh
            names[slot] = key
            fresh += 1
        self.next_generation = fresh
        self.counts[FREE] -= len(slots)
        self.counts[FILLING] += len(slots)

    def lend(self, slots: Sequence[int]) -> None:
        """FREE -> LENT with a fresh generation and one pin."""
        if self.on_io_end is not None:
            self.on_io_end(slots)
        self.move(slots, FREE, LENT)
        fresh = max(self.next_generation, self.now_ns())
        for number, slot in enumerate(slots):
            self.pins[slot] = 1
            self.generation[slot] = fresh + number
        self.next_generation = fresh + len(slots)

    def name_lent(self, slots: Sequence[int], keys: Sequence[OffloadKey]) -> None:
        """LENT -> FILLING, for `keys[i]` in `slots[i]`; generation and pin stay."""
        self.move(slots, LENT, FILLING)
        if self.on_named is not None:
            self.on_named(slots, keys)
        for slot, key in zip(slots, keys, strict=True):
            self.keys[slot] = key

    def set_generations(self, slots: Sequence[int], generations: Sequence[int]) -> None:
        """Generations found when the tier was opened; new ones continue above them."""
        for slot, generation in zip(slots, generations, strict=True):
            self.generation[slot] = generation
        self.next_generation = max(self.next_generation, max(generations, default=0) + 1)

    def pin(self, slots: Iterable[int]) -> None:
        """Add a pin to each of these filling or ready slots."""
        pins, state, taken = self.pins, self.state, 0
        for slot in slots:
            held = pins[slot]
            if not held and state[slot] == READY:
                taken += 1
            pins[slot] = held + 1
        self.evictable -= taken

    def unpin(self, slots: Iterable[int]) -> list[int]:
        """Remove a pin from each; returns the quarantined slots whose last pin this was."""
        pins, state, freed = self.pins, self.state, 0
        ended = []
        for slot in slots:
            left = pins[slot] - 1
            if left < 0:
                raise IntegrityError(f"slot {slot} has no hold to end")
            pins[slot] = left
            if not left:
                if state[slot] == READY:
                    freed += 1
                elif state[slot] == QUARANTINED:
                    ended.append(slot)
        self.evictable += freed
        return ended

    def check(self) -> None:
        """The sum over states equals the slot count, and every counter agrees with the arrays."""
        actual = [0] * len(SlotState)
        evictable = 0
        for slot, state in enumerate(self.state):
            actual[state] += 1
            if state == READY and not self.pins[slot]:
                evictable += 1
            if state in (ABSENT, FREE, RETIRED) and self.pins[slot]:
                raise IntegrityError(f"slot {slot} is {SlotState(state).name} with {self.pins[slot]} holds")
            if state in (FILLING, QUARANTINED, LENT) and not self.pins[slot]:
                raise IntegrityError(f"slot {slot} is {SlotState(state).name} and without a pin it")
            if (self.keys[slot] is not None) != (state in (FILLING, READY)):
                raise IntegrityError(f"slot {slot} is {SlotState(state).name} with key {self.keys[slot] is not None}")
        if actual != self.counts or sum(actual) != len(self.state):
            raise IntegrityError(f"slot states are {actual}, counted {self.counts}")
        if evictable != self.evictable:
            raise IntegrityError(f"{evictable} slots are evictable, counted {self.evictable}")

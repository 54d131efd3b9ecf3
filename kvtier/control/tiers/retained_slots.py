"""The blocks that one owned tier does not evict, because they are retained."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvtier.control.tiers.slot_table import READY, SlotTable
from kvtier.errors import IntegrityError
from kvtier.policy import EvictionPolicy
from kvtier.types.keys import OffloadKey, key_group


class RetainedSlots:
    """Ready slots of retained keys: pinned, and outside of the policy's order, so that eviction never walks over them.

    A retained `keys` may have no slot yet, or none any more: it counts in `used_bytes` all the same, so that
    `used_bytes` never exceeds `max_bytes`, whatever is stored.
    """

    def __init__(self, table: SlotTable, policy: EvictionPolicy, slot_bytes: Sequence[int]) -> None:
        self._table = table
        self._policy = policy
        self._slot_bytes = slot_bytes
        self.keys: dict[OffloadKey, None] = {}
        self.slots: dict[int, None] = {}
        self.used_bytes = 0
        self.max_bytes = 0

    def fits(self, key: OffloadKey) -> bool:
        """True if this key may be retained here as well."""
        return self.used_bytes + self._slot_bytes[key_group(key)] <= self.max_bytes

    def add(self, key: OffloadKey, slot: int | None) -> None:
        """Retain a key that is not retained here; `slot` is its ready slot, if it has one."""
        self.keys[key] = None
        self.used_bytes += self._slot_bytes[key_group(key)]
        if slot is not None:
            self._policy.remove((slot,))
            self._keep(slot)

    def remove(self, keys: Iterable[tuple[OffloadKey, int | None]]) -> None:
        """These keys, with the ready slots they have, are ordinary again; the slot of the last is the most recent."""
        ordinary = []
        for key, slot in keys:
            del self.keys[key]
            self.used_bytes -= self._slot_bytes[key_group(key)]
            if slot is not None:
                del self.slots[slot]
                ordinary.append(slot)
        self._table.unpin(ordinary)
        self._policy.insert(ordinary)

    def keep(self, slots: Sequence[int]) -> list[int]:
        """These slots became ready. Those of retained keys stay; returns the others, for the policy."""
        names, others = self._table.keys, []
        for slot in slots:
            if names[slot] in self.keys:
                self._keep(slot)
            else:
                others.append(slot)
        return others

    def _keep(self, slot: int) -> None:
        self._table.pin((slot,))
        self.slots[slot] = None

    def others(self, slots: Sequence[int]) -> Sequence[int]:
        """The ready slots among these that the policy orders."""
        return [slot for slot in slots if slot not in self.slots] if self.slots else slots

    def on_loss(self, slots: Sequence[int]) -> Sequence[int]:
        """The blocks of these ready slots are gone. Returns the slots that the policy orders."""
        kept = [slot for slot in slots if slot in self.slots] if self.slots else ()
        if not kept:
            return slots
        others = self.others(slots)
        for slot in kept:
            del self.slots[slot]
        self._table.unpin(kept)
        return others

    def check(self) -> None:
        """Raise IntegrityError unless every kept slot is ready, pinned and of a retained key, and the bytes agree."""
        table = self._table
        for slot in self.slots:
            if table.state[slot] != READY or not table.pins[slot] or table.keys[slot] not in self.keys:
                raise IntegrityError(f"slot {slot} is kept, and not ready, without a pin, or of no retained key")
        used = sum(self._slot_bytes[key_group(key)] for key in self.keys)
        if used != self.used_bytes or used > self.max_bytes:
            raise IntegrityError(f"{used} bytes are retained, counted {self.used_bytes}, allowed {self.max_bytes}")

"""What may come back: the record of what victims submitted, had acknowledged, and reset."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from kvtier.testing.driver import STEP, WORD_BYTES, Bytes, content
from kvtier.types.jobs import BlockStatus
from kvtier.types.keys import OffloadKey, key_group

from .shared_log import STATUSES, EventKind, Load, SharedLog, Word
from .world import World, era_of

_LOADED = STATUSES.index(BlockStatus.LOADED)
_CORRUPT = STATUSES.index(BlockStatus.CORRUPT)


def first_word(found: Bytes) -> int:
    """The word that names whose bytes these are, if they are whole."""
    return int.from_bytes(found[:WORD_BYTES].tobytes(), "little")


def whole(found: Bytes) -> bool:
    """True if these bytes are all of one block, of whichever key."""
    words = found.view("<u8")
    return bool((words == words[0] + np.arange(len(words), dtype=np.uint64) * np.uint64(STEP)).all())


def base_of(key: OffloadKey, tag: int) -> int:
    """The first word of a block's content."""
    return first_word(content(key, tag, WORD_BYTES))


@dataclass(slots=True)
class Verdict:
    """What the loads of one victim after opening came to."""

    verified: int = 0
    corrupt: int = 0
    missing: int = 0
    expected: int = 0
    lost: int = 0
    complaints: list[str] = field(default_factory=list)


class Oracle:
    """The record of one world. `world.stored` maps the first word of each block ever submitted to its key and tag."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.acknowledged: dict[int, tuple[int, int]] = {}
        self._slots: dict[int, int] = {}
        self._floor = 0

    # -- what a victim did ---------------------------------------------------------------------------------------

    def learn(self, log: SharedLog) -> None:
        """Take over what a living process has submitted so far."""
        for kind, number, tag, _ in log.events():
            if kind == EventKind.STORE:
                self.world.stored[base_of(self.world.keys[number], tag)] = number, tag

    def absorb(self, log: SharedLog) -> str:
        """Take over what a dead victim noted. Returns what is wrong with it, empty if nothing."""
        complaint = self._epochs(log)
        world = self.world
        era = world.next_era - 1 if log.words[Word.RESET_BEGUN] else world.eras.get(log.words[Word.EPOCH], 0)
        self.learn(log)
        for kind, number, tag, slot in log.events():
            if kind == EventKind.STORE:
                self.forget_slot(slot)
            elif kind == EventKind.EVICTED:
                self.acknowledged.pop(number, None)
            elif kind == EventKind.MET:
                stored = world.stored.get(slot)
                if stored is None or stored[0] != number or era_of(stored[1]) != era_of(tag):
                    complaint = f"a load of key number {number} in era {era_of(tag)} brought the bytes of {stored}"
            elif era_of(tag) == era:
                self.acknowledged[number] = tag, slot
                self._slots[slot] = number
        if log.words[Word.RESET_BEGUN] and not log.words[Word.RESET_DONE]:
            self.forget_all()
        return complaint

    def _epochs(self, log: SharedLog) -> str:
        words, world = log.words, self.world
        if not words[Word.OPENED]:
            return ""
        epoch, complaint = words[Word.EPOCH], ""
        if epoch < self._floor or epoch not in world.eras:
            complaint = f"opened at epoch {epoch} after {self._floor} was acknowledged"
        begun = words[Word.RESET_BEGUN]
        if begun:
            world.eras[begun] = world.next_era
            world.next_era += 1
            self.acknowledged.clear()
            self._slots.clear()
        self._floor = max(self._floor, epoch, words[Word.RESET_DONE])
        return complaint

    def forget_slot(self, slot: int) -> None:
        """Nothing is expected in this slot any more."""
        number = self._slots.pop(slot, -1)
        if number >= 0 and self.acknowledged.get(number, (0, -1))[1] == slot:
            del self.acknowledged[number]

    def forget_all(self) -> None:
        """Nothing is expected to come back."""
        self.acknowledged.clear()
        self._slots.clear()

    # -- what the next one found ---------------------------------------------------------------------------------

    def judge(self, log: SharedLog, before: dict[int, tuple[int, int]]) -> Verdict:
        """Compare every byte that a victim loaded after opening. `before`: what had been acknowledged by then."""
        verdict = Verdict()
        groups: dict[int, list[Load]] = {}
        loaded = set()
        for load in log.loads():
            if load.status == _LOADED:
                groups.setdefault(key_group(self.world.keys[load.key]), []).append(load)
                loaded.add(load.key)
            elif load.status == _CORRUPT:
                verdict.corrupt += 1
            else:
                verdict.missing += 1
        for group, loads in groups.items():
            verdict.complaints += self._compare(log, group, loads)
            verdict.verified += len(loads)
        if log.words[Word.LOADED]:
            verdict.expected = len(before)
            verdict.lost = len(before.keys() - loaded)
        return verdict

    def _compare(self, log: SharedLog, group: int, loads: list[Load]) -> list[str]:
        words = self.world.geometry.aligned_bytes(group) // WORD_BYTES
        rows = log.rows.view.view(np.uint64)[:, :words]
        found = rows[[load.row for load in loads]]
        bases = np.array([self._base(load, int(word)) for load, word in zip(loads, found[:, 0], strict=True)])
        found -= np.arange(words, dtype=np.uint64) * np.uint64(STEP)
        right = (found == bases[:, None]).all(axis=1)
        return [self._complaint(log, load) for load, held in zip(loads, right.tolist(), strict=True) if not held]

    def _base(self, load: Load, found: int) -> np.uint64:
        """The first word that a loaded block must have."""
        stored = self.world.stored.get(found)
        if stored is not None and stored[0] == load.key and self._is(stored[1], load.tag):
            return np.uint64(found)
        return np.uint64(base_of(self.world.keys[load.key], load.tag))

    def _is(self, stored: int, wanted: int) -> bool:
        """True if a tag that was stored is the one a load expected; layout `files` knows no more than the era."""
        return stored == wanted if self.world.layout == "slab" else era_of(stored) == era_of(wanted)

    def _complaint(self, log: SharedLog, load: Load) -> str:
        owner = self.world.stored.get(first_word(log.rows.view[load.row]))
        whose = "of no key" if owner is None else f"those of key number {owner[0]}, tag {owner[1]:x}"
        return f"key number {load.key}, tag {load.tag:x}: the bytes are {whose}, or not all of one block"

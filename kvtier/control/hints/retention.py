"""Blocks that are retained: in sets with a deadline, each block in one tier, within that tier's quota.

A block is retained where it is: in a lower tier that has it, else in the CPU tier, and moves to a lower tier once that
has it too. A pinned block is retained in the CPU tier. It counts in the quota of its tier from the moment it is
accepted, so a quota holds at every moment. What has no room is refused then, not later.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain, islice

from kvtier.control.state import ControlState
from kvtier.control.tiers.owned_tier import OwnedTier
from kvtier.errors import IntegrityError
from kvtier.types.hints import HintRefusal
from kvtier.types.keys import OffloadKey

CLAIMS_MAX = 1 << 19
"""Blocks of all sets together, one that several sets retain as many times: about 100 bytes each."""
RELEASED_AT_ONCE = 512
"""Blocks that one step makes ordinary again, at most: the engine waits meanwhile."""
REST_SECONDS = 0.001


@dataclass(slots=True, eq=False)
class RetainedSet:
    """The blocks that one session retains, or pins, until a time on the stack's clock. It has at least one."""

    until: float = -math.inf
    keys: dict[OffloadKey, None] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class RetainedBlock:
    """The tier that retains a block, and how many sets retain and how many of them pin it."""

    home: OwnedTier
    sets: int = 0
    pins: int = 0


class Retention:
    """All sets, and what they retain. `expires_at` is when `expire` has work: infinite if there is none."""

    def __init__(self, control: ControlState, sets_max: int) -> None:
        self._control = control
        self._sets_max = sets_max
        self._sets: dict[tuple[str, bool, int], RetainedSet] = {}  # by session, whether it pins, and 0 or a serial
        self._serials = itertools.count(1)
        self._blocks: dict[OffloadKey, RetainedBlock] = {}
        self._claims = 0
        self.expires_at = math.inf

    @property
    def num_sets(self) -> int:
        """The number of sets."""
        return len(self._sets)

    def __bool__(self) -> bool:
        """True if anything is retained."""
        return bool(self._sets)

    def keys_of(self, session: str, most: int) -> list[OffloadKey]:
        """The keys that a session retains and pins, in the order of its hints, up to a number of each."""
        keys = [each.keys for pinned in (False, True) if (each := self._sets.get((session, pinned, 0))) is not None]
        return list(dict.fromkeys(chain.from_iterable(islice(each, most) for each in keys)))

    def __contains__(self, key: OffloadKey) -> bool:
        return key in self._blocks

    def is_pinned(self, key: OffloadKey) -> bool:
        """True if a set pins this block."""
        block = self._blocks.get(key)
        return block is not None and block.pins > 0

    # -- sets come and go ----------------------------------------------------------------------------------------

    def retain(
        self, session: str, keys: Sequence[OffloadKey], until: float, pinned: bool, now: float
    ) -> list[HintRefusal | None]:
        """Add blocks to a session's set; for each why it was refused, or None."""
        name = (session, pinned, 0)
        found = self._sets.get(name)
        if found is None and len(self._sets) >= self._sets_max:
            return [HintRefusal.TOO_MANY] * len(keys)
        if found is not None and found.until <= now:  # it lapses on its own, a part in each step
            self._sets[session, pinned, next(self._serials)] = self._sets.pop(name)
            found = None
        one = found or RetainedSet()
        refusals = [None if key in one.keys else self._claim(one, key, pinned, now) for key in keys]
        if one.keys and None in refusals:
            one.until = max(one.until, until)
            self._sets[name] = one
            self._find_next()
        return refusals

    def release(self, session: str, now: float) -> int:
        """A session's sets lapse now. Returns how many blocks they have; several steps may pass until all are
        ordinary."""
        count = 0
        for pinned in (False, True):
            one = self._sets.get((session, pinned, 0))
            if one is not None:
                one.until = -math.inf
                count += len(one.keys)
        self.expires_at = min(self.expires_at, now) if count else self.expires_at
        return count

    def expire(self, now: float) -> None:
        """Blocks of sets that have lapsed are ordinary again, a bounded number in one step, the last of a set first."""
        left = RELEASED_AT_ONCE
        for name, one in list(self._sets.items()):
            if one.until <= now and left:
                keys = list(islice(reversed(one.keys), left))
                self._drop(one, keys, name[1])
                left -= len(keys)
                if not one.keys:
                    del self._sets[name]
        self._find_next()
        if self.expires_at <= now:
            self.expires_at = now + REST_SECONDS

    def reset(self) -> None:
        """No block from before is to be had any more. The tiers are reset by themselves."""
        self._sets.clear()
        self._blocks.clear()
        self._claims = 0
        self.expires_at = math.inf

    def _find_next(self) -> None:
        self.expires_at = min((one.until for one in self._sets.values()), default=math.inf)

    # -- blocks --------------------------------------------------------------------------------------------------

    def _claim(self, one: RetainedSet, key: OffloadKey, pinned: bool, now: float) -> HintRefusal | None:
        if self._claims >= CLAIMS_MAX:
            return HintRefusal.TOO_MANY
        block, cpu = self._blocks.get(key), self._control.cpu
        if block is None or (pinned and block.home is not cpu):
            home = self._find_home(key, pinned, now)
            if isinstance(home, HintRefusal):
                return home
            if block is not None:
                self._move(key, block, home)
            else:
                home.retain(key)
                block = self._blocks[key] = RetainedBlock(home)
        block.sets += 1
        block.pins += pinned
        one.keys[key] = None
        self._claims += 1
        return None

    def _find_home(self, key: OffloadKey, pinned: bool, now: float) -> OwnedTier | HintRefusal:
        """The tier that is to retain this block: one that has it, or is to get it."""
        cpu, refusal = self._control.cpu, HintRefusal.NOT_FOUND
        if not pinned:
            for tier in self._control.owned_tiers[1:]:
                if tier.presence(key, now):
                    if tier.retained.fits(key):
                        return tier
                    refusal = HintRefusal.OVER_QUOTA
        if key in cpu.directory or (pinned and any(index.presence(key, now) for index in self._control.indexes[1:])):
            if cpu.retained.fits(key):
                return cpu
            refusal = HintRefusal.OVER_QUOTA
        return refusal

    def _drop(self, one: RetainedSet, keys: Sequence[OffloadKey], pinned: bool) -> None:
        """These blocks leave a set."""
        ordinary: dict[str, list[OffloadKey]] = {}
        for key in keys:
            del one.keys[key]
            block = self._blocks[key]
            block.sets -= 1
            block.pins -= pinned
            if not block.sets:
                del self._blocks[key]
                ordinary.setdefault(block.home.name, []).append(key)
            elif pinned and not block.pins:
                self._move_down(key, block, self._control.owned_tiers[1:])
        self._claims -= len(keys)
        for tier in self._control.owned_tiers:
            if tier.name in ordinary:
                tier.unretain(ordinary[tier.name])

    def _move_down(self, key: OffloadKey, block: RetainedBlock, tiers: Sequence[OwnedTier]) -> None:
        """A block of the CPU tier that is not pinned is retained in the first of these that has it and has room."""
        for tier in tiers:
            if tier.ready(key) is not None and tier.retained.fits(key):
                self._move(key, block, tier)
                return

    def _move(self, key: OffloadKey, block: RetainedBlock, home: OwnedTier) -> None:
        home.retain(key)
        block.home.unretain((key,))
        block.home = home

    def on_store_below(self, tier: OwnedTier, keys: Sequence[OffloadKey]) -> None:
        """A lower tier has these blocks now: those that the CPU tier retains, and does not pin, are retained there."""
        for key in keys:
            block = self._blocks.get(key)
            if block is not None and not block.pins and block.home is self._control.cpu:
                self._move_down(key, block, (tier,))

    def hold_back(self) -> None:
        """No lower tier is used any more: what they retained is retained in the CPU tier if it is there, or lost."""
        cpu, lost = self._control.cpu, dict[OffloadKey, None]()
        for key, block in self._blocks.items():
            if block.home is not cpu:
                if key in cpu.directory and cpu.retained.fits(key):
                    cpu.retain(key)
                    block.home = cpu
                else:
                    lost[key] = None
        for name, one in list(self._sets.items()):
            gone = [key for key in one.keys if key in lost]
            for key in gone:
                del one.keys[key]
            self._claims -= len(gone)
            if not one.keys:
                del self._sets[name]
        for key in lost:
            del self._blocks[key]
        self._find_next()

    def check(self) -> None:
        """Raise IntegrityError unless each block of a set is retained in its tier, and nothing else is."""
        names = [(key, pinned) for (_, pinned, _), one in self._sets.items() for key in one.keys]
        sets, pins = Counter(key for key, _ in names), Counter(key for key, pinned in names if pinned)
        if len(names) != self._claims or sets.keys() != self._blocks.keys():
            raise IntegrityError(f"{len(names)} blocks in sets, counted {self._claims}, of {len(self._blocks)}")
        for key, block in self._blocks.items():
            pinned_below = block.pins and block.home is not self._control.cpu
            if pinned_below or (sets[key], pins[key]) != (block.sets, block.pins):
                raise IntegrityError(f"a block is in {sets[key]} sets, of which {pins[key]} pin it: {block}")
        for tier in self._control.owned_tiers:
            homes = [key for key, block in self._blocks.items() if block.home is tier]
            if sorted(homes) != sorted(tier.retained.keys):
                raise IntegrityError(f"{tier.name} retains {len(tier.retained.keys)} blocks, sets {len(homes)} there")

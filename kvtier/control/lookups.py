"""Presence of each key in the highest tier that has it, and how much each tier was asked for."""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.control.state import ControlState, LowerTier
from kvtier.control.tiers.owned_tier import OwnedTier
from kvtier.control.tiers.slot_table import READY
from kvtier.tier_api.contract import LookupResult
from kvtier.types.keys import OffloadKey


def look_up(control: ControlState, keys: Sequence[OffloadKey], now: float, ask: bool) -> list[LookupResult]:
    """HIT, HIT_PENDING, RETRY or MISS for each key of a request, given in prefix order."""
    cpu = control.cpu
    state = cpu.table.state
    hit, pending = LookupResult.HIT, LookupResult.HIT_PENDING
    rows = list(map(cpu.directory.get, keys))
    absent = rows.count(None)
    if not absent:
        if ask:
            control.cpu_counters.looked_up += len(rows)
        states = bytes(map(state.__getitem__, rows))  # type: ignore[arg-type]
        if states.count(READY) == len(rows):
            return [hit] * len(rows)
        return [hit if each == READY else pending for each in states]
    missed = keys if absent == len(rows) else [key for key, row in zip(keys, rows, strict=True) if row is None]
    found = look_below(control.lowers, missed, now, ask)
    if ask and (control.all_owned or LookupResult.RETRY not in found):
        control.cpu_counters.looked_up += len(rows)
        control.cpu_counters.missed += absent
    if absent == len(rows):
        return found
    below = iter(found)
    return [next(below) if row is None else hit if state[row] == READY else pending for row in rows]


def look_below(
    lowers: Sequence[LowerTier], keys: Sequence[OffloadKey], now: float, ask: bool = True
) -> list[LookupResult]:
    """HIT_PENDING, RETRY or MISS for each key of a request, given in prefix order: of the highest tier that has it.

    `lowers` are the tiers below the CPU, the highest first; those that may not load are left out. A shared tier is
    asked for what it is not known to have or to lack, unless a tier above it has that, or `ask` is False.

    Counted are the keys that each tier was looked up for and lacks, once nothing is unknown and unless `ask` is False:
    then an engine repeats its lookup.
    """
    healthy = []
    for lower in lowers:
        if lower.may_load(now):
            healthy.append(lower)
    if len(healthy) == 1 and healthy[0].direct is not None and not healthy[0].roots.any_silent:
        return _look_directly(healthy[0], healthy[0].direct, keys, ask)
    results = [LookupResult.MISS] * len(keys)
    left = list(range(len(keys)))
    asked = []
    for lower in healthy:
        missed = []
        find = lower.index.find if ask else lower.index.presences
        for at, presence in zip(left, find([keys[at] for at in left], now), strict=True):
            if presence and not lower.silent(keys[at]):
                results[at] = LookupResult.HIT_PENDING
                continue
            if presence is None:
                results[at] = LookupResult.RETRY
            missed.append(at)
        asked.append((lower, len(left), len(missed)))
        left = missed
    if ask and LookupResult.RETRY not in results:
        for lower, looked_up, lacked in asked:
            lower.counters.look_up(looked_up, lacked)
    return results


def _look_directly(lower: LowerTier, tier: OwnedTier, keys: Sequence[OffloadKey], ask: bool) -> list[LookupResult]:
    """The usual case in a few batch calls: one tier, in which a key's slot decides whether the key is present."""
    state, pending, miss = tier.table.state, LookupResult.HIT_PENDING, LookupResult.MISS
    slots = list(map(tier.directory.get, keys))
    absent = slots.count(None)
    if absent == len(slots):
        results = [miss] * absent
    elif not absent and bytes(map(state.__getitem__, slots)).count(READY) == len(slots):  # type: ignore[arg-type]
        results = [pending] * len(slots)
    else:
        results = [miss if slot is None or state[slot] != READY else pending for slot in slots]
        absent = results.count(miss)
    if ask:
        lower.counters.looked_up += len(slots)
        lower.counters.missed += absent
    return results

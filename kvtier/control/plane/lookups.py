"""Presence of each key in the highest tier that has it, and how much each tier was asked for."""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.control.state import ControlState
from kvtier.control.tiers.lower_tier import LowerTier
from kvtier.control.tiers.owned_tier import OwnedTier
from kvtier.control.tiers.slot_table import FILLING, READY
from kvtier.tier.contract import LookupResult
from kvtier.types.checks import check_keys
from kvtier.types.keys import OffloadKey

HIT, HIT_PENDING, RETRY, MISS = LookupResult.HIT, LookupResult.HIT_PENDING, LookupResult.RETRY, LookupResult.MISS


_RESULTS = {True: HIT_PENDING, False: MISS, None: RETRY}


def look_up(control: ControlState, keys: Sequence[OffloadKey], now: float, ask: bool) -> list[LookupResult]:
    """HIT, HIT_PENDING, RETRY or MISS for each key of a request, given in prefix order.

    Where memory answers, what is no key is a miss. Raises UsageError for what cannot be asked for.
    """
    cpu, counters = control.cpu, control.cpu_counters
    state = cpu.table.state
    try:
        rows = list(map(cpu.directory.get, keys))
    except TypeError:
        check_keys(keys, control.num_groups)
        raise
    absent = rows.count(None)
    if not absent:
        if ask:
            counters.looked_up += len(rows)
        for row in rows:
            if state[row] != READY:  # type: ignore[index]
                return [HIT if state[row] == READY else HIT_PENDING for row in rows]  # type: ignore[index]
        return [HIT] * len(rows)
    if type(keys) is not list and type(keys) is not tuple:
        check_keys(keys, control.num_groups)
    missed = keys if absent == len(rows) else [key for key, row in zip(keys, rows, strict=True) if row is None]
    found = look_below(control.lowers, missed, now, ask)
    if ask and (control.all_owned or RETRY not in found):
        counters.looked_up += len(rows)
        counters.missed += absent
    if absent == len(rows):
        return found
    below = iter(found)
    return [next(below) if row is None else HIT if state[row] == READY else HIT_PENDING for row in rows]


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
    if not healthy:
        return [MISS] * len(keys)
    if len(healthy) == 1 and healthy[0].direct is not None and not healthy[0].roots.any_silent:
        return _look_directly(healthy[0], healthy[0].direct, keys, ask)
    results: list[LookupResult] = []
    left: Sequence[int] = range(len(keys))
    asked = []
    for lower in healthy:
        some = keys if len(left) == len(keys) else [keys[at] for at in left]
        presences = lower.index.find(some, now) if ask else lower.index.presences(some, now)
        if lower.roots.any_silent:
            presences = [there and not lower.silent(key) for key, there in zip(some, presences, strict=True)]
        found = list(map(_RESULTS.__getitem__, presences))
        if not results:
            results = found
        else:
            for at, result in zip(left, found, strict=True):
                if result is not MISS:
                    results[at] = result
        absent = len(found) - found.count(HIT_PENDING)
        asked.append((lower.counters, len(left), absent))
        if not absent:
            break
        if lower is not healthy[-1]:
            left = [at for at, result in zip(left, found, strict=True) if result is not HIT_PENDING]
    if ask and RETRY not in results:
        for counters, looked_up, lacked in asked:
            counters.look_up(looked_up, lacked)
    return results


def _look_directly(lower: LowerTier, tier: OwnedTier, keys: Sequence[OffloadKey], ask: bool) -> list[LookupResult]:
    """The usual case in a few batch calls: one tier, in which a key's slot decides whether the key is present."""
    state = tier.table.state
    slots = list(map(tier.directory.get, keys))
    absent = slots.count(None)
    if absent == len(slots):
        results = [MISS] * absent
    elif not absent and not tier.table.counts[FILLING]:  # all that the directory has is ready
        results = [HIT_PENDING] * len(slots)
    else:
        results = [MISS if slot is None or state[slot] != READY else HIT_PENDING for slot in slots]
        absent = results.count(MISS)
    if ask:
        lower.counters.looked_up += len(slots)
        lower.counters.missed += absent
    return results

"""The index of the blocks in a tier: the same questions for owned tiers and for shared ones."""

from collections.abc import Sequence

from kvtier.tier.contract import LookupResult
from kvtier.types.keys import OffloadKey

ASKED_AT_ONCE = 1024
"""Keys that one call has looked up, at most: of those behind them it is not known yet."""


class TierIndex:
    """Base of `OwnedTier`, which knows what its tier has, and of `SharedTier`, which keeps hints and has no slots.

    A method with a default does nothing, or returns nothing, for the kind of tier that has no use for it. `changes`
    collects, in order, keys that became reachable or ceased to be, and `queries` keys to look up, until the plane takes
    them.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.changes: list[tuple[bool, list[OffloadKey]]] = []
        self.queries: list[OffloadKey] = []

    # -- presence ------------------------------------------------------------------------------------------------

    def presence(self, key: OffloadKey, now: float) -> bool | None:
        """True if the tier has this key, None where that is unknown."""
        raise NotImplementedError

    def needs(self, key: OffloadKey, now: float) -> bool:
        """True if a store of this key has a use: the tier is not known to have it."""
        return not self.presence(key, now)

    def needs_all(self, keys: Sequence[OffloadKey], now: float) -> bool:
        """True if the tier needs each of these keys."""
        return all(self.needs(key, now) for key in keys)

    def request(self, key: OffloadKey, now: float) -> None:
        """Have a key looked up whose presence is unknown, unless that lookup is in flight."""

    def find(self, keys: Sequence[OffloadKey], now: float) -> list[bool | None]:
        """The presence of each key of a request, given in prefix order; what is unknown is looked up."""
        return self.presences(keys, now)

    def presences(self, keys: Sequence[OffloadKey], now: float) -> list[bool | None]:
        """The presence of each key. Nothing is looked up."""
        return [self.presence(key, now) for key in keys]

    def take_queries(self) -> list[OffloadKey]:
        """The keys to look up that were not taken before."""
        queries, self.queries = self.queries, []
        return queries

    def take_answers(self, keys: Sequence[OffloadKey], results: Sequence[LookupResult], now: float) -> None:
        """The backend's answers to a query."""

    def note_presence(self, key: OffloadKey, present: bool, now: float) -> None:
        """Something was found out about a key (a lookup, a store, a load that missed)."""

    # -- slots ---------------------------------------------------------------------------------------------------

    def slots(self, keys: Sequence[OffloadKey]) -> list[int]:
        """The slots of keys that are present, where the tier has slots."""
        return []

    def pin(self, slots: Sequence[int]) -> None:
        """Keep these slots from being reused until `unpin`."""

    def unpin(self, slots: Sequence[int]) -> None:
        """Remove one pin from each; quarantined slots without a pin become free."""

    def quarantine(self, slots: Sequence[int]) -> None:
        """The fill is late or abandoned: unreachable at once, free only when its I/O has ended (`unpin`)."""

    # -- everything ----------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Nothing from before is reachable from here on."""
        raise NotImplementedError

    def take_changes(self) -> list[tuple[bool, list[OffloadKey]]]:
        """(removed, keys) in the order things happened, each once."""
        changes, self.changes = self.changes, []
        return changes

    def check(self) -> None:
        """Raise IntegrityError unless all that is recorded agrees."""

"""Events for routers and indexes about a stack's contents."""

from kvtier.types.keys import Medium, OffloadKey
from kvtier.types.values import compared_value


@compared_value
class OffloadingEvent:
    """Blocks became reachable in a tier of this engine, or ceased to be. `medium` is the tier's kind, `tier` its name.

    There is no block size: one event may mix groups of different sizes, for removals as well.
    """

    keys: tuple[OffloadKey, ...]
    medium: Medium
    removed: bool
    tier: str

"""The age of blocks and its limit: KV bytes are a prompt, and some must not be kept for longer than a time.

For tiers whose generations are wall-clock times in nanoseconds, which every block's header states.
"""

from collections.abc import Callable
from typing import NamedTuple

from kvtier.tier.block_envelope import COUNTER_LIMIT

_NANOSECONDS = 1_000_000_000
_PUT_BACK_NS = 60 * _NANOSECONDS
FIRST_TIME_NS = 10**18
"""In 2001. Smaller generations are no times: the tier `fs` counted them at first."""


class AgeLimit(NamedTuple):
    """The generations that count, both ends included."""

    oldest: int = 0
    newest: int = COUNTER_LIMIT

    def allows(self, generation: int) -> bool:
        """True for a block that counts."""
        return self.oldest <= generation <= self.newest


NO_AGE_LIMIT = AgeLimit()


def age_limit(max_age_seconds: int | None, now_ns: int) -> AgeLimit:
    """The oldest time of a store that counts now, by a wall clock; None: every time counts.

    A block from further ahead than the limit does not count either: its age is not known, and a clock that was once
    wrong must not keep it for ever. So no block is used for longer than twice the limit, whatever a clock did.
    """
    if max_age_seconds is None:
        return NO_AGE_LIMIT
    length = max_age_seconds * _NANOSECONDS
    return AgeLimit(max(now_ns - length, FIRST_TIME_NS), now_ns + length)


def next_generation(last: int, now_ns: int) -> int:
    """The generation of a block that is stored now: larger than the last one, unless the clock was put back by more
    than a minute. Then it follows the clock, or all that is stored from then on would be as far ahead as the clock was.
    """
    return now_ns if last - now_ns > _PUT_BACK_NS else max(last + 1, now_ns)


def stored_at(generation: int) -> float | None:
    """Time of a block's store, in seconds since 1970; None where its generation is no time."""
    return generation / _NANOSECONDS if generation >= FIRST_TIME_NS else None


class BlockAges(NamedTuple):
    """The clock and the limit of an owned tier's block ages: `now_ns` is the wall clock that new generations follow."""

    now_ns: Callable[[], int]
    max_age_seconds: int | None = None

    def limit(self) -> AgeLimit:
        """The oldest time of a store that counts now."""
        return age_limit(self.max_age_seconds, self.now_ns())

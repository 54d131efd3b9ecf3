"""Checks of what a caller hands in, where it comes in, before anything changes.

Each check raises UsageError. A value of a wrong type would otherwise be found in the middle of a step, which ends the
control plane for the life of the stack.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from numbers import Real
from operator import methodcaller
from types import UnionType

from kvtier.errors import UsageError
from kvtier.types.arrays import IntArray
from kvtier.types.hints import Demote, Pin, Prefetch, Release, Retain
from kvtier.types.keys import GROUP_BYTES, key_group, make_key
from kvtier.types.requests import RequestInfo

WHOLE_MAX = 1 << 53
"""Counts and priorities are below it, on either side of zero: whole numbers that a float holds exactly."""
SECONDS_MAX = 1e9
"""About thirty years."""
FEW = 64
"""Up to this number of ids, a list is read faster than an array."""
HINTS = (Retain, Pin, Prefetch, Demote, Release)


def check_keys(keys: object, num_groups: int | None = None) -> None:
    """These are offload keys, in a sequence, of the layout's groups where these are given. Tens of nanoseconds each."""
    if type(keys) is not list and type(keys) is not tuple and not isinstance(keys, Sequence):
        raise UsageError(f"keys come in a sequence, such as a list, and not as {type(keys).__name__}")
    if not keys:
        return
    if not {bytes}.issuperset(map(type, keys)):
        wrong = next((key for key in keys if not isinstance(key, bytes)), None)
        if wrong is not None or None in keys:
            raise UsageError(f"an offload key is bytes, and not {type(wrong).__name__}")
    if min(map(len, keys)) <= GROUP_BYTES:
        raise UsageError(f"an offload key has a hash of at least one byte before the {GROUP_BYTES} bytes of its group")
    if num_groups is not None and not all(map(_is_of_groups(num_groups), keys)):
        wrong = next(group for key in keys if (group := key_group(key)) >= num_groups)
        raise UsageError(f"there is no group {wrong} among {num_groups}")


@cache
def _is_of_groups(num_groups: int) -> Callable[[object], object]:
    return methodcaller("endswith", tuple(make_key(b"", group) for group in range(num_groups)))


def check_types(what: str, *values: tuple[object, type | UnionType]) -> None:
    """Each value is of its type."""
    for value, kind in values:
        if not isinstance(value, kind):
            wanted = getattr(kind, "__name__", str(kind))
            raise UsageError(f"{what}: a {type(value).__name__} where a {wanted} belongs")


def outside(values: IntArray, end: int) -> int | None:
    """A value that is not in 0..end-1; None if all are."""
    few = values.tolist() if len(values) <= FEW else (int(values.min()), int(values.max()))
    if not few or (min(few) >= 0 and max(few) < end):
        return None
    return min(few) if min(few) < 0 else max(few)


def check_text(what: str, value: object) -> None:
    """This is text."""
    if not isinstance(value, str):
        raise UsageError(f"{what} is text, and not {type(value).__name__}")


def check_number(what: str, value: object, least: float = -math.inf) -> None:
    """This is a finite number of at least so much. True and False are none."""
    number = math.nan
    if isinstance(value, Real) and not isinstance(value, bool):
        with suppress(OverflowError):
            number = float(value)
    if not (math.isfinite(number) and number >= least):
        at_least = "" if least == -math.inf else f" of at least {least:g}"
        raise UsageError(f"{what} is a finite number{at_least}, and not {_shown(value)}")


def check_timeout(value: object) -> None:
    """These are seconds for which a call may wait: a number that every clock and lock of the system takes."""
    check_number("a time to wait", value)
    if value > SECONDS_MAX:  # type: ignore[operator]  # a number, as was seen just now
        raise UsageError(f"a call waits for {SECONDS_MAX:g} seconds at most")


def check_whole(what: str, value: object, least: int = 0) -> None:
    """This is a whole number of at least so much. True and False are none."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value < WHOLE_MAX:
        raise UsageError(f"{what} is a whole number from {least} on, below {WHOLE_MAX}, and not {_shown(value)}")


def check_info(info: object) -> None:
    """This describes a request, or is None."""
    if info is None:
        return
    if not isinstance(info, RequestInfo):
        raise UsageError(f"info is a RequestInfo, and not {type(info).__name__}")
    check_text("the session of a request", info.session)
    check_text("the tenant of a request", info.tenant)
    check_whole("the priority of a request", info.priority, -WHOLE_MAX)
    if info.retain_until is not None:
        check_number("retain_until", info.retain_until)


def check_hint(hint: object, num_groups: int) -> None:
    """This is one of the five hints, of keys of the layout's groups. Seconds are above 0."""
    if not isinstance(hint, HINTS):
        raise UsageError(f"a hint is a Retain, Pin, Prefetch, Demote or Release, and not {type(hint).__name__}")
    check_text("the session of a hint", hint.session)
    if not isinstance(hint, Release):
        check_keys(hint.keys, num_groups)
    if isinstance(hint, Retain | Pin):
        check_number("the time for which blocks are retained", hint.seconds)
        if not hint.seconds > 0:
            raise UsageError(f"blocks are retained for a number of seconds above 0, not for {hint.seconds}")


def _shown(value: object) -> str:
    """A number as it is, anything else by its type: it may be long, or secret."""
    return repr(value) if isinstance(value, float | bool) else type(value).__name__

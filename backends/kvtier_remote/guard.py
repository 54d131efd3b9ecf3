"""The guard around transports: each call ends in its time, and returns what `Transport` says, whatever servers do."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import wraps
from typing import Any, TypeVar

from kvtier.errors import ResourceError
from kvtier.tier.shared_epoch import EPOCH_CEILING
from kvtier.types.jobs import BlockOutcome, failed
from kvtier_remote.answers import bad_answer, items_of, number, reading_answers
from kvtier_remote.options import RemoteOptions
from kvtier_remote.transport import Marker, TransportInfo, Value

_INCARNATION_BYTES = 8
K = TypeVar("K")
Call = Callable[..., Awaitable[Any]]
Check = Callable[[Any, Sequence[Any]], Any]
"""A check of a call's result, given that and the call's arguments; returns what is passed on. Raises OSError."""


def guarded(kind: type[K]) -> type[K]:
    """A class of transports, whose options are in `_options`, with a guard around the calls that it defines.

    An answer of another kind raises OSError (EBADMSG), of `get` and `put` it is the outcome of each value. A call that
    moves no values ends within `job_timeout_seconds`, and `open` within `open_seconds`. `get` and `put`, whose memory
    the library has, bound themselves. The errno of an outcome is one that the system has a name for.
    """
    for name, check in _CHECKS.items():
        if (call := vars(kind).get(name)) is not None:
            setattr(kind, name, _answering(call, check))
    for name in ("get", "put"):
        setattr(kind, name, _moving(vars(kind)[name]))
    kind.open = _opening(vars(kind)["open"])  # type: ignore[attr-defined]
    return kind


def _options_of(transport: Any) -> RemoteOptions:
    options: RemoteOptions = transport._options
    return options


def _answering(call: Call, check: Check) -> Call:
    @wraps(call)
    async def answer(transport: Any, *given: Any) -> Any:
        seconds = _options_of(transport).job_timeout_seconds
        try:
            with reading_answers():
                async with asyncio.timeout(seconds):
                    return check(await call(transport, *given), given)
        except TimeoutError:
            raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT)) from None

    return answer


def _moving(call: Call) -> Call:
    @wraps(call)
    async def move(transport: Any, values: Sequence[Value], *more: Any) -> list[BlockOutcome]:
        try:
            with reading_answers():
                outcomes: list[BlockOutcome] = await call(transport, values, *more)
                items_of(outcomes, len(values), len(values))
        except OSError as error:
            outcomes = [failed(error.errno or errno.EIO)] * len(values)
        return [one if one.errno in _ERRNOS else failed(errno.EIO) for one in outcomes]

    return move


def _opening(call: Call) -> Call:
    @wraps(call)
    async def open(transport: Any) -> TransportInfo:
        seconds = _options_of(transport).open_seconds
        try:
            with reading_answers():
                async with asyncio.timeout(seconds):
                    return _facts(await call(transport), ())
        except TimeoutError:
            raise ResourceError(f"the server does not let a tier open within {seconds:g} s") from None
        except OSError as error:
            raise ResourceError(f"the server does not answer as it should ({error.strerror})") from None

    return open


def _facts(facts: TransportInfo, given: Sequence[Any]) -> TransportInfo:
    number(facts.capacity_bytes)
    return facts


def _presence(found: Sequence[bool | None], given: Sequence[Any]) -> Sequence[bool | None]:
    if any(one is not None and not isinstance(one, bool) for one in items_of(found, len(given[0]), len(given[0]))):
        raise bad_answer()
    return found


def _marker(marker: Any, given: Sequence[Any]) -> Marker | None:
    if marker is None:
        return None
    if not isinstance(marker, Marker):
        raise bad_answer()
    number(marker.epoch, EPOCH_CEILING - 1)
    if len(marker.incarnation) != _INCARNATION_BYTES:
        raise bad_answer()
    return marker


def _nothing(answer: object, given: Sequence[Any]) -> None:
    """Accepts any answer, because it is not used."""


def _count(evicted: int, given: Sequence[Any]) -> int:
    return number(evicted)


_ERRNOS = frozenset((0, *errno.errorcode))
_CHECKS: Mapping[str, Check] = {
    "present": _presence,
    "remove": _nothing,
    "describe": _nothing,
    "read_marker": _marker,
    "swap_marker": _marker,
    "keep_lease": _nothing,
    "evicted": _count,
}

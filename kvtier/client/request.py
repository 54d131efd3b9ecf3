"""A request of an engine beside a stack process: what it was found, and what it asked for. No I/O."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import fields
from typing import Protocol

from kvtier.service import wire
from kvtier.service.wire import TEXT_CHARACTERS_MAX, Keys, bounded_text, split
from kvtier.tier.contract import LookupResult
from kvtier.types.checks import WHOLE_MAX
from kvtier.types.hints import KVHint
from kvtier.types.keys import OffloadKey
from kvtier.types.requests import RequestInfo

RESULTS: dict[int | None, LookupResult] = {
    None: LookupResult.RETRY,
    wire.PENDING: LookupResult.HIT_PENDING,
    wire.UNKNOWN: LookupResult.RETRY,
    wire.MISSING: LookupResult.MISS,
    wire.IN_ROW: LookupResult.HIT,
    wire.LATE: LookupResult.MISS,
}
"""What a lookup answers for the state of a key; None: it was not asked for."""


class RequestOwner(Protocol):
    """Calls of a request to the state of its engine."""

    def say(self, item: wire.Item) -> None:
        """Send an item with the next step."""

    def reserve(self, request: ClientRequest, keys: Sequence[OffloadKey]) -> None:
        """Have these keys brought into rows and leased."""

    def release(self, request: ClientRequest) -> None:
        """The request's leases end."""

    def end(self, request: ClientRequest, drops: bool = True) -> None:
        """The request is over."""


class ClientRequest:
    """A request of the engine: the rows leased to it by key, and the state of what it asked for.

    `present` are keys that were in rows when it last heard of them. `reserved` are those that it has reserved.
    `waiting` are numbers without an answer, `updates` those of answers that tiers have yet to complete.
    `leased_in_turn` is the turn of its last lease.
    """

    def __init__(self, core: RequestOwner, request_id: str, info: RequestInfo | None = None) -> None:
        self.id = request_id
        self.leased: dict[OffloadKey, tuple[int, int]] = {}
        self.leased_in_turn = 0
        self.states: dict[OffloadKey, int] = {}
        self.waiting: set[int] = set()
        self.updates: set[int] = set()
        self.present: set[OffloadKey] = set()
        self.reserved: dict[OffloadKey, None] = {}
        self.ended = False
        self._core = core
        self._info = info
        self._begun = False

    @property
    def served(self) -> bool:
        """True when all that was asked and reserved has an answer."""
        return not self.waiting

    @property
    def reservation(self) -> ClientRequest | None:
        """Itself once it has reserved keys; None once a load has used them, or their lease has ended."""
        return self if self.reserved else None

    def answer(self, key: OffloadKey) -> LookupResult | None:
        """The answer for a key once this is served; None if it was not reserved."""
        if key not in self.reserved:
            return None
        return LookupResult.HIT if key in self.leased else LookupResult.MISS

    def extend(self, keys: Sequence[OffloadKey]) -> None:
        """Add blocks of its prompt, then of its output, in prefix order, for policies that follow requests."""
        for first, part in split(keys):
            if self._begun:
                self._core.say(wire.Extend(self.id, Keys.of(part)))
            else:
                more = first + len(part) < len(keys)
                self._core.say(wire.Begin(self.id, Keys.of(part), {} if more else _fields(self._info), more))
        self._begun = self._begun or bool(keys)

    def reserve(self, keys: Sequence[OffloadKey]) -> None:
        """Have keys brought into rows and leased, as far as loading them is sooner than computing them."""
        self._core.reserve(self, keys)

    def worth_loading(self, keys: Sequence[OffloadKey]) -> int:
        """All of them: the stack process reserves no more than is worth a load."""
        return len(keys)

    def release(self) -> None:
        """End the leases; the request goes on."""
        self._core.release(self)

    def end(
        self,
        output_tokens: int | None = None,
        *,
        input_tokens: int | None = None,
        prompt: Sequence[OffloadKey] | None = None,
        arrived: float | None = None,
    ) -> None:
        """End the request and its leases. `arrived` is a time of `time.monotonic`. Idempotent."""
        if self.ended:
            return
        if self._begun or prompt is not None:
            self._core.end(self, drops=False)
            age = 0.0 if arrived is None else max(0.0, time.monotonic() - arrived)
            for first, part in split(prompt) if prompt else [(0, ())]:
                more = prompt is not None and first + len(part) < len(prompt)
                named = None if prompt is None else Keys.of(part)
                self._core.say(wire.End(self.id, input_tokens, output_tokens, named, age, more))
        else:
            self._core.end(self)


def _fields(info: RequestInfo | None) -> dict[str, str | int | float | None]:
    """The fields of a request's facts that are set, as an item holds them: a client may send texts of any length."""
    if info is None:
        return {}
    known = {each.name: value for each in fields(info) if (value := getattr(info, each.name)) != each.default}
    texts = [name for name, value in known.items() if isinstance(value, str)]
    known |= {name: bounded_text(known[name], TEXT_CHARACTERS_MAX // len(texts)) for name in texts}
    if info.priority:
        known["priority"] = max(-WHOLE_MAX, min(info.priority, WHOLE_MAX - 1))
    return known


def hint_item(hint: KVHint, keys: Sequence[OffloadKey], number: int = 0) -> wire.Hint:
    """The item of a hint for some of its keys."""
    seconds: float = getattr(hint, "seconds", 0.0)
    return wire.Hint(type(hint).__name__.lower(), Keys.of(keys), bounded_text(hint.session), seconds, number)

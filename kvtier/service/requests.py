"""An engine's requests, hints and speed, passed to the policies, the recorder and the choice of loads of a stack."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields

from kvtier.service import wire
from kvtier.service.hint_quota import HintQuota
from kvtier.service.wire import TEXT_CHARACTERS_MAX, Breach, Item
from kvtier.stack.request import StackRequest
from kvtier.stack.tier_stack import TierStack
from kvtier.types.hints import Demote, HintResult, KVHint, Pin, Prefetch, Release, Retain
from kvtier.types.keys import OffloadKey, RequestId
from kvtier.types.requests import RequestInfo

OPEN_MAX = 16384
"""Requests of an engine that are open at most; the oldest count as aborted."""
PARTS_KEYS_MAX = 1 << 18
"""Keys of prompts of an engine of which further parts are to come."""
INFO_FIELDS = frozenset(field.name for field in fields(RequestInfo))
SETS: dict[str, type[Prefetch | Demote]] = {"prefetch": Prefetch, "demote": Demote}
TIMED: dict[str, type[Retain | Pin]] = {"retain": Retain, "pin": Pin}

Unpack = Callable[[wire.Keys], list[OffloadKey]]


class EngineRequests:
    """The open requests of one engine; their ids begin with its `number`."""

    def __init__(self, stack: TierStack, number: int, hints: HintQuota) -> None:
        self._stack = stack
        self._number = number
        self._hints = hints
        self._open: dict[str, StackRequest] = {}
        self._parts: dict[tuple[str, bool], list[OffloadKey]] = {}
        self._parts_keys = 0

    def handle(self, item: Item, unpack: Unpack, now: float) -> None:
        """Take in an item. Raises Breach, UsageError for values that are none."""
        match item:
            case wire.Begin():
                self._begin(item, unpack)
            case wire.Extend():
                keys, request = unpack(item.keys), self._open.get(item.request)
                if request is not None:
                    request.extend(keys)
            case wire.End():
                self._end(item, unpack, now)
            case wire.Touch():
                request = self._open.get(item.request) or self._stack.request(self._name(item.request))
                request.touch(unpack(item.keys))
            case wire.Computed():
                self._stack.engine.prompt_computed(item.tokens, now - item.begun, now - item.ended)
            case _:
                raise Breach(f"{type(item).__name__} is no item of a request")

    def hint(self, item: wire.Hint, keys: list[OffloadKey], now: float) -> HintResult:
        """Follow a hint, as far as the engine's quota goes. Raises Breach, UsageError for one that is none."""
        hint, refusal = self._hints.take(_hint(item, keys), now)
        left = len(keys) - len(getattr(hint, "keys", keys))
        if keys and left == len(keys):  # a prefetch without keys is another hint
            return HintResult(0, {refusal: left} if refusal else {})
        result = self._stack.hint(hint)
        if refusal is None:
            return result
        return HintResult(result.accepted, {**result.refused, refusal: result.refused.get(refusal, 0) + left})

    def on_reset(self) -> None:
        """Nothing of before is retained."""
        self._hints.reset()

    def _begin(self, item: wire.Begin, unpack: Unpack) -> None:
        keys = self._join(item.request, False, item.more, unpack(item.keys))
        if keys is None or item.request in self._open:
            return
        texts = [value for value in item.info.values() if isinstance(value, str)]
        if not INFO_FIELDS.issuperset(item.info) or sum(map(len, texts)) > TEXT_CHARACTERS_MAX:
            raise Breach("a request is described by what is no field of it, or at too great a length")
        info = RequestInfo(**item.info)  # type: ignore[arg-type]  # the stack checks the types
        self._open[item.request] = self._stack.request(self._name(item.request), keys, info=info)
        if len(self._open) > OPEN_MAX:
            self._open.pop(next(iter(self._open))).end()

    def _end(self, item: wire.End, unpack: Unpack, now: float) -> None:
        prompt = None
        if item.prompt is not None:
            prompt = self._join(item.request, True, item.more, item.prompt.unpack())  # keys of any group, or hashes
        if item.more:
            return
        self._forget(item.request, False)
        request = self._open.pop(item.request, None)
        if request is None and prompt is not None:
            request = self._stack.request(self._name(item.request))
        if request is not None:
            arrived = now - item.age
            request.end(item.output_tokens, input_tokens=item.input_tokens, prompt=prompt, arrived=arrived)

    def _join(self, request: str, ends: bool, more: bool, keys: list[OffloadKey]) -> list[OffloadKey] | None:
        """All keys of a prompt, once no part is to follow."""
        before = self._forget(request, ends)
        joined = [*before, *keys] if before else keys
        if not more:
            return joined
        self._parts[request, ends] = joined
        self._parts_keys += len(joined)
        if self._parts_keys > PARTS_KEYS_MAX:
            raise Breach("the prompts of an engine have too many parts")
        return None

    def _forget(self, request: str, ends: bool) -> list[OffloadKey]:
        parts = self._parts.pop((request, ends), [])
        self._parts_keys -= len(parts)
        return parts

    def end_all(self) -> None:
        """The engine has gone: its requests are aborted."""
        requests = list(self._open.values())
        self._open.clear()
        self._parts.clear()
        self._parts_keys = 0
        for request in requests:
            request.end()

    def _name(self, request: str) -> RequestId:
        return RequestId(f"{self._number}:{request}")


def _hint(item: wire.Hint, keys: list[OffloadKey]) -> KVHint:
    if item.kind in TIMED:
        return TIMED[item.kind](keys, item.seconds, item.session)
    if item.kind in SETS:
        return SETS[item.kind](keys, item.session)
    if item.kind != "release":
        raise Breach(f"{item.kind[:32]!r} is no hint")
    return Release(item.session)

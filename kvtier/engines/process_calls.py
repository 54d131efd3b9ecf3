"""Requests of an engine at a stack process, and the calls for adapters: each is whole, or ends the connection."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, Self, TypeVar

from kvtier.aio.process_guard import ProcessGuard
from kvtier.client.request import ClientRequest
from kvtier.client.stack_client import StackClient
from kvtier.errors import KVTierError, UsageError
from kvtier.service import wire
from kvtier.tier.contract import LookupResult
from kvtier.types.checks import WHOLE_MAX, check_keys, check_number, check_text, check_whole
from kvtier.types.keys import OffloadKey

P = ParamSpec("P")
T = TypeVar("T")


class ConnectedStack:
    """Base of `ProcessStack`: its connection, and the life of a call."""

    def __init__(self) -> None:
        self._owner = ProcessGuard()
        self._client: StackClient | None = None
        self._closing = self._in_call = False

    @property
    def _stack(self) -> ConnectedStack:
        return self

    def _opened(self) -> StackClient:
        if self._owner.pid != ProcessGuard.here:
            self._owner.check()
        if self._client is None:
            raise UsageError("the stack is not open")
        if self._closing:
            raise UsageError("the stack is closed")
        return self._client

    def _client_for(self, keys: Sequence[OffloadKey]) -> StackClient:
        """The client, within a call for keys of the layout that messages hold. Raises UsageError for others."""
        client = self._client
        assert client is not None
        check_keys(keys, client.geometry.num_groups)
        check_wire_keys(keys)
        return client

    def _begin_call(self) -> None:
        self._opened()
        if self._in_call:
            raise UsageError("a call of the stack was interrupted for this one")
        self._in_call = True

    def _give_up(self) -> None:
        """A call ended in the middle."""
        if self._client is not None:
            self._client.cut()


class CallsOfStack(Protocol):
    """Calls that belong to a stack."""

    @property
    def _stack(self) -> ConnectedStack:
        """The stack."""


C = TypeVar("C", bound=CallsOfStack)


def call_of_stack(method: Callable[Concatenate[C, P], T]) -> Callable[Concatenate[C, P], T]:
    """A call of an open stack, from one thread. Half a call may be wrong state: where it is interrupted, by Ctrl-C or a
    defect, the connection ends, everything is a miss from then on, and the exception goes on."""

    @wraps(method)
    def call(self: C, /, *args: P.args, **kwargs: P.kwargs) -> T:
        stack = self._stack
        stack._begin_call()
        try:
            return method(self, *args, **kwargs)
        except KVTierError:  # before any change
            raise
        except BaseException:
            stack._give_up()
            raise
        finally:
            stack._in_call = False

    return call


class ProcessReservation:
    """The keys that a request has reserved. `served` once each is leased or missing."""

    def __init__(self, request: ClientRequest) -> None:
        self.keys: list[OffloadKey] = []
        self._request = request

    @property
    def served(self) -> bool:
        """True when every key asked for is leased or missing."""
        return self._request.served

    def hits(self) -> list[bool]:
        """For each key in the order asked: True if it is leased in a row."""
        return [key in self._request.leased for key in self.keys]

    def answer(self, key: OffloadKey) -> LookupResult | None:
        """The answer for a key once this is served; None if it was not reserved."""
        if key not in self.keys:
            return None
        return LookupResult.HIT if key in self._request.leased else LookupResult.MISS


class ProcessRequest:
    """A request of the engine, made by `request` of a stack: `with stack.request(request_id, keys) as request`.

    It begins with its first keys. Policies that follow requests (`reuse`), `curves` and `record` are given it; without
    them it only holds leases. It may stay open over many steps of an engine; `end` it then. `id` is the engine's.
    """

    def __init__(self, stack: ConnectedStack, request: ClientRequest) -> None:
        self.id = request.id
        self._stack = stack
        self._request = request
        self._reserved: ProcessReservation | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._stack._closing:
            self.end()

    @call_of_stack
    def extend(self, keys: Sequence[OffloadKey]) -> None:
        """Add blocks of its output: each group's follow those that it has, in prefix order.

        Call it before their stores: the next prompt of a conversation begins with them. The first keys of a request
        that was made without are its prompt's. Nothing happens once it has ended.
        """
        self._stack._client_for(keys)
        self._extend(keys)

    def _extend(self, keys: Sequence[OffloadKey]) -> None:
        if self._stack._opened().core.follows and not self._request.ended:
            self._request.extend(keys)

    @call_of_stack
    def reserve(self, keys: Sequence[OffloadKey]) -> ProcessReservation:
        """Bring keys into rows and lease them to this request; a later `step` takes in the answer."""
        if self._request.ended:
            raise UsageError(f"request {self.id} has ended")
        self._stack._client_for(keys)
        if self._reserved is None or self._request.reservation is None:
            self._reserved = ProcessReservation(self._request)
        self._reserved.keys += [key for key in dict.fromkeys(keys) if key not in self._request.reserved]
        self._request.reserve(keys)
        return self._reserved

    @property
    def reservation(self) -> ProcessReservation | None:
        """The keys reserved and leased so far. None once a load has used it, or its lease has ended."""
        self._stack._opened()
        return self._reserved if self._request.reservation is not None else None

    @call_of_stack
    def release(self) -> None:
        """End the leases; the request goes on."""
        self._request.release()

    @call_of_stack
    def touch(self, keys: Sequence[OffloadKey]) -> None:
        """Count these keys, given in prefix order, as used; call it for the hits of the request after its stores."""
        self._stack._client_for(keys).touch(self._request, keys)

    @call_of_stack
    def worth_loading(self, keys: Sequence[OffloadKey]) -> int:
        """The number of the keys: the stack process reserves and loads no more of them than is worth it."""
        self._stack._client_for(keys)
        return self._request.worth_loading(keys)

    @call_of_stack
    def end(
        self,
        output_tokens: int | None = None,
        *,
        input_tokens: int | None = None,
        prompt: Sequence[OffloadKey] | None = None,
        arrived: float | None = None,
    ) -> None:
        """End the request and its leases. `output_tokens` is the length of the output where it is known. Idempotent.

        The arguments are those of `StackRequest.end`, for the trace that the stack may keep (`record`).
        """
        for what, value in (("an output", output_tokens), ("a prompt", input_tokens)):
            if value is not None:
                check_whole(f"the tokens of {what}", value)
        if prompt is not None:
            check_keys(prompt)
            check_wire_keys(prompt)
        if arrived is not None:
            check_number("when a request arrived", arrived)
        self._request.end(output_tokens, input_tokens=input_tokens, prompt=prompt, arrived=arrived)


class ProcessCalls:
    """`ProcessStack.engine`: an adapter's facts about its engine, and what it needs beyond lookups and jobs."""

    def __init__(self, driver: ConnectedStack) -> None:
        self._stack = driver

    @property
    def follows_requests(self) -> bool:
        """True if the policy of a tier follows requests, or with `curves`: the keys of a request have a use."""
        return self._stack._opened().core.follows

    @call_of_stack
    def prompt_computed(self, tokens: int, begun: float, ended: float) -> None:
        """Record that the engine has computed these tokens of a prompt, between two times by `time.monotonic`."""
        check_number("the tokens of a prompt", tokens, least=0)
        check_number("when a prompt began", begun)
        check_number("when a prompt ended", ended, least=begun)
        now = time.monotonic()
        self._stack._opened().core.say(wire.Computed(int(min(tokens, WHOLE_MAX)), now - begun, now - ended))

    @call_of_stack
    def hold_back(self, reason: str) -> None:
        """Have no lower tier load or store for this engine from here on; `reason` is for the log.

        For weights that were replaced in a running engine: `reset` the stack, then call this. An engine that shares the
        stack with others is served nothing any more.
        """
        check_text("the reason", reason)
        self._stack._opened().core.hold_back(reason)

    @call_of_stack
    def announce(self, keys: Sequence[OffloadKey]) -> None:
        """Have `take_events` return once more which tiers have these keys: each is removed and then stored."""
        self._stack._client_for(keys).announce(keys)

    @call_of_stack
    def storable(self, keys: Sequence[OffloadKey]) -> tuple[list[OffloadKey], int]:
        """(the keys that are in no row as far as is known, in their order; how many rows are lent to the engine)."""
        client = self._stack._opened()
        check_keys(keys, client.geometry.num_groups)
        return client.core.storable(None, keys), client.core.room


def check_wire_keys(keys: Sequence[OffloadKey]) -> None:
    """Raise UsageError for a key that no message holds."""
    if keys and max(map(len, keys)) > wire.KEY_BYTES_MAX:
        raise UsageError(f"an offload key has at most {wire.KEY_BYTES_MAX} bytes in a stack of another process")

"""A request of the engine from its first block to its end, as a stack has it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Self

from kvtier.aio.process_guard import ProcessGuard
from kvtier.control.reservations import Reservation
from kvtier.errors import UsageError
from kvtier.stack.assembly import StackParts, StackSettings
from kvtier.stack.guard import Guarded, GuardedCalls, guard_step
from kvtier.stack.open_stack import OpenStack
from kvtier.stack.watching.operator_log import TierWatch
from kvtier.tier.contract import Clock
from kvtier.types.checks import check_info, check_keys, check_number, check_text, check_whole
from kvtier.types.keys import OffloadKey, RequestId
from kvtier.types.requests import NO_INFO, RequestInfo


class ServesRequests(Guarded):
    """A stack, as its requests and the calls for adapters see it."""

    _parts: StackParts
    _settings: StackSettings
    _watch: TierWatch
    _owner: ProcessGuard
    _assembled: OpenStack | None
    _clock: Clock
    _closing: bool

    def _opened(self) -> OpenStack:
        if self._owner.pid != ProcessGuard.here:
            self._owner.check()
        if self._assembled is None:
            raise UsageError("the stack is not open")
        if self._closing:
            raise UsageError("the stack is closed")
        return self._assembled

    @abstractmethod
    def _carry_out(self) -> None:
        """Send what the control plane decided, now or with the engine's next step. Part of a step."""

    @guard_step
    def request(
        self,
        request_id: RequestId,
        keys: Sequence[OffloadKey] | None = None,
        *,
        info: RequestInfo | None = None,
        time: float | None = None,
    ) -> StackRequest:
        """A request of the engine that uses these keys, each group's from its first block on, in prefix order.

        Make it before the request's loads and stores. Without keys it begins when it is extended.

        `time`, in seconds, is what policies take for the time, such as that of a trace; once one is given, their time
        is that of the requests. Without it they go by the stack's clock. A time that goes back counts as the last one.
        """
        assembled = self._opened()
        check_text("a request's id", request_id)
        if info is not None:
            check_info(info)
        if time is not None:
            check_number("the time of a request", time)
        request = StackRequest(self, request_id, info or NO_INFO, time)
        if keys is not None:
            check_keys(keys, assembled.geometry.num_groups)
            request._begin(assembled, keys)
        return request


class StackRequest(GuardedCalls):
    """A request of the engine, made by `request` of a stack: `with stack.request(request_id, keys) as request`.

    It begins with its first keys. Policies that follow requests (`reuse`), `curves` and `record` are given it; without
    them it only holds leases. It may stay open over many steps of an engine; `end` it then. `id` is the engine's.
    """

    _driver: ServesRequests

    def __init__(self, stack: ServesRequests, request_id: RequestId, info: RequestInfo, time: float | None) -> None:
        self._driver = stack
        self.id = request_id
        self._info = info
        self._time = time
        self._begun = self._ended = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._driver._closing:
            self.end()

    @guard_step
    def extend(self, keys: Sequence[OffloadKey]) -> None:
        """Add blocks of its output: each group's follow those that it has, in prefix order.

        Call it before their stores: the next prompt of a conversation begins with them. The first keys of a request
        that was made without are its prompt's. Nothing happens once it has ended.
        """
        assembled = self._driver._opened()
        check_keys(keys, assembled.geometry.num_groups)
        if not self._begun:
            self._begin(assembled, keys)
        elif assembled.plane.uses is not None:
            assembled.plane.uses.extend(self.id, keys)

    def _begin(self, assembled: OpenStack, keys: Sequence[OffloadKey]) -> None:
        """Begin with the blocks of the prompt. Part of a step."""
        self._begun = True
        if assembled.plane.uses is not None:
            assembled.plane.uses.begin(self.id, keys, self._driver._clock(), self._time, self._info)

    @guard_step
    def reserve(self, keys: Sequence[OffloadKey]) -> Reservation:
        """Bring keys into rows and lease them to this request; see `kvtier.control.reservations`."""
        if self._ended:
            raise UsageError(f"request {self.id} has ended")
        assembled = self._driver._opened()
        check_keys(keys, assembled.geometry.num_groups)
        reservation = assembled.plane.reserve(self.id, keys, self._driver._clock())
        self._driver._carry_out()
        return reservation

    @property
    def reservation(self) -> Reservation | None:
        """The keys reserved and leased so far, in O(1). None once a load has used it, or its lease has ended."""
        return self._driver._opened().plane.reservation(self.id)

    @guard_step
    def release(self) -> None:
        """End the leases; the request goes on."""
        self._driver._opened().plane.end_request(self.id, self._driver._clock())
        self._driver._carry_out()

    @guard_step
    def touch(self, keys: Sequence[OffloadKey]) -> None:
        """Count these keys, given in prefix order, as used; call it for the hits of the request after its stores."""
        assembled = self._driver._opened()
        check_keys(keys, assembled.geometry.num_groups)
        plane = assembled.plane
        if plane.uses is not None:
            plane.uses.on_touch(keys, self._driver._clock())
        plane.touch(keys)

    @guard_step
    def worth_loading(self, keys: Sequence[OffloadKey]) -> int:
        """The number of the keys, given in prefix order, that are worth a load: all, unless a tier is slower than the
        engine computes (`prefill_tokens_per_second`). `TierStack.lookup` heeds it; others call it once for a request.
        """
        assembled = self._driver._opened()
        check_keys(keys, assembled.geometry.num_groups)
        return assembled.plane.choice.worth_loading(keys, self._driver._clock())

    @guard_step
    def end(
        self,
        output_tokens: int | None = None,
        *,
        input_tokens: int | None = None,
        prompt: Sequence[OffloadKey] | None = None,
        arrived: float | None = None,
    ) -> None:
        """End the request and its leases. `output_tokens` is the length of the output where it is known. Idempotent.

        With both lengths and `prompt` it is written to the trace that the stack may keep (`record`). `prompt` are the
        keys of the first group of all whole blocks of the prompt, or the hashes in them, in prefix order, hits or not;
        they must not change afterwards. `arrived` is when the request came, by `time.monotonic`; now if absent.
        """
        if self._ended:
            return
        for what, value in (("an output", output_tokens), ("a prompt", input_tokens)):
            if value is not None:
                check_whole(f"the tokens of {what}", value)
        if prompt is not None:
            check_keys(prompt)
        if arrived is not None:
            check_number("when a request arrived", arrived)
        assembled, now = self._driver._opened(), self._driver._clock()
        plane, recorder = assembled.plane, assembled.recorder
        plane.end_request(self.id, now)
        self._driver._carry_out()
        if plane.uses is not None:
            plane.uses.end(self.id, output_tokens)
            if assembled.models is not None:
                assembled.models.save_if_due(now)
        if recorder is not None and prompt is not None and input_tokens is not None and output_tokens is not None:
            recorder.record(prompt, input_tokens, output_tokens, now if arrived is None else arrived)
        self._begun = self._ended = True

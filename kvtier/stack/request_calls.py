"""The calls of a stack that tell of the engine's requests, beside their loads and stores."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Sequence

from kvtier.stack.assembly import StackParts, StackSettings
from kvtier.stack.guard import Guarded, guard_step
from kvtier.stack.open_stack import OpenStack
from kvtier.tier.contract import Clock
from kvtier.types.checks import check_hint, check_info, check_keys, check_number, check_text, check_whole
from kvtier.types.hints import HintResult, KVHint
from kvtier.types.keys import OffloadKey, RequestId
from kvtier.types.requests import NO_INFO, RequestInfo


class RequestCalls(Guarded):
    """What policies that follow requests, the recorder and the choice of loading or computing learn from an engine."""

    _parts: StackParts
    _settings: StackSettings
    _assembled: OpenStack | None
    _clock: Clock

    @abstractmethod
    def _opened(self) -> OpenStack:
        """The parts of the open stack; UsageError if it is not open."""

    @abstractmethod
    def _decided(self) -> None:
        """The control plane may have decided something: send it, now or with the engine's next step. Part of a step."""

    @abstractmethod
    def end_leases(self, request_id: RequestId) -> None:
        """The request's leases end; it goes on."""

    def _check_request(self, request_id: RequestId, keys: Sequence[OffloadKey], info: RequestInfo | None) -> None:
        """Raise UsageError unless these are a request's id, its keys and what describes it."""
        check_keys(keys, self._opened().geometry.num_groups)
        check_text("a request's id", request_id)
        if info is not None:
            check_info(info)

    @property
    def follows_requests(self) -> bool:
        """True if the policy of a tier follows requests, or with `curves`: `begin_request` has a use."""
        return self._opened().plane.uses is not None

    @guard_step
    def begin_request(
        self,
        request_id: RequestId,
        keys: Sequence[OffloadKey],
        *,
        time: float | None = None,
        info: RequestInfo | None = None,
    ) -> None:
        """A request begins that uses these keys, each group's from its first block on, in prefix order.

        Call it before the request's loads and stores, for policies that follow requests (`reuse`); without such a
        policy it does nothing. `time`, in seconds, is what they take for the time, such as that of a trace; once one is
        given, their time is that of the calls. Without it they go by the stack's clock. A time that goes back counts as
        the last one.
        """
        self._check_request(request_id, keys, info)
        if time is not None:
            check_number("the time of a request", time)
        plane = self._opened().plane
        if plane.uses is not None:
            plane.uses.begin(request_id, keys, self._clock(), time, info or NO_INFO)

    @guard_step
    def extend_request(self, request_id: RequestId, keys: Sequence[OffloadKey]) -> None:
        """A request goes on with these keys, blocks of its output: each group's follow those it has, in prefix order.

        Call it before their stores, for policies that follow requests: the next prompt of a conversation begins with
        them. It does nothing for a request that did not begin, or has ended.
        """
        self._check_request(request_id, keys, None)
        plane = self._opened().plane
        if plane.uses is not None:
            plane.uses.extend(request_id, keys)

    @guard_step
    def hint(self, hint: KVHint) -> HintResult:
        """Follow what the application says of blocks: `Retain`, `Pin`, `Prefetch`, `Demote` or `Release`.

        Returns at once: how many blocks it is followed for, and why others are left as they are, which is no error.
        Raises UsageError for a hint that is none, or whose values are of wrong types.
        """
        assembled = self._opened()
        check_hint(hint, assembled.geometry.num_groups)
        result = assembled.plane.hint(hint, self._clock())
        self._decided()
        return result

    @guard_step
    def touch(self, keys: Sequence[OffloadKey]) -> None:
        """One request used these keys, given in prefix order; call it for the hits of a request after its stores."""
        assembled = self._opened()
        check_keys(keys, assembled.geometry.num_groups)
        plane = assembled.plane
        if plane.uses is not None:
            plane.uses.on_touch(keys, self._clock())
        plane.touch(keys)

    @guard_step
    def worth_loading(self, keys: Sequence[OffloadKey]) -> int:
        """How many of a request's keys, given in prefix order, are worth a load: all, unless a tier is slower than the
        engine computes (`prefill_tokens_per_second`). `TierStack.lookup` heeds it; others call it once for a request.
        """
        assembled = self._opened()
        check_keys(keys, assembled.geometry.num_groups)
        return assembled.plane.choice.worth_loading(keys, self._clock())

    @guard_step
    def prompt_computed(self, tokens: int, begun: float, ended: float) -> None:
        """The engine has computed so many tokens of a prompt, between these times by `time.monotonic`.

        `worth_loading` goes by that where the stack file says `prefill_tokens_per_second: measured`; less than a block
        says nothing of the speed, nor does a clock that stood still. Raises UsageError for a time that goes back.
        """
        check_number("the tokens of a prompt", tokens, least=0)
        check_number("when a prompt began", begun)
        check_number("when a prompt ended", ended, least=begun)
        blocks = tokens / self._parts.namespace.layout.tokens_per_offloaded_block(0)
        if self._settings.measures_prefill and blocks >= 1 and ended > begun:
            self._opened().plane.choice.on_compute(blocks, begun, ended)

    def record_request(
        self, keys: Sequence[OffloadKey], *, input_tokens: int, output_tokens: int, arrived: float | None = None
    ) -> None:
        """A request has ended: have it written to the trace if the stack keeps one. It never waits and never fails.

        `keys` are those of the first group of all whole blocks of the prompt, or the hashes in them, in prefix order,
        hits or not; they must not change afterwards. The lengths are in tokens. `arrived` is when it came, by
        `time.monotonic`; now if absent.
        """
        assembled = self._opened()
        check_keys(keys)
        check_whole("the tokens of a prompt", input_tokens)
        check_whole("the tokens of an output", output_tokens)
        if arrived is not None:
            check_number("when a request arrived", arrived)
        recorder = assembled.recorder
        if recorder is not None:
            recorder.record(keys, input_tokens, output_tokens, time.monotonic() if arrived is None else arrived)

    @guard_step
    def end_request(self, request_id: RequestId, *, output_tokens: int | None = None) -> None:
        """The request has ended, with so many tokens of output where known: its leases end too."""
        check_text("a request's id", request_id)
        if output_tokens is not None:
            check_whole("the tokens of an output", output_tokens)
        self.end_leases(request_id)
        plane = self._opened().plane
        if plane.uses is not None:
            plane.uses.end(request_id, output_tokens)
            if self._assembled is not None and self._assembled.models is not None:
                self._assembled.models.save_if_due(self._clock())

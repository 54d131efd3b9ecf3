"""Calls of a stack for engine adapters alone."""

from __future__ import annotations

from collections.abc import Sequence

from kvtier.stack.guard import GuardedCalls, guard_step
from kvtier.stack.request import ServesRequests
from kvtier.types.checks import check_keys, check_number, check_text
from kvtier.types.keys import OffloadKey


class EngineCalls(GuardedCalls):
    """`TierStack.engine`: an adapter's facts about its engine, and what it needs beyond lookups and jobs."""

    _driver: ServesRequests

    @property
    def follows_requests(self) -> bool:
        """True if the policy of a tier follows requests, or with `curves`: the keys of a request have a use."""
        return self._driver._opened().plane.uses is not None

    @guard_step
    def prompt_computed(self, tokens: int, begun: float, ended: float) -> None:
        """Record that the engine has computed these tokens of a prompt, between two times by `time.monotonic`.

        `worth_loading` goes by that where the stack file says `prefill_tokens_per_second: measured`; less than a block
        says nothing of the speed, nor does a clock that stood still. Raises UsageError for a time that goes back.
        """
        check_number("the tokens of a prompt", tokens, least=0)
        check_number("when a prompt began", begun)
        check_number("when a prompt ended", ended, least=begun)
        stack = self._driver
        blocks = tokens / stack._parts.namespace.layout.tokens_per_offloaded_block(0)
        if stack._settings.measures_prefill and blocks >= 1 and ended > begun:
            stack._opened().plane.choice.on_compute(blocks, begun, ended)

    @guard_step
    def hold_back(self, reason: str) -> None:
        """Have no lower tier load or store from here on, for the life of the stack; `reason` is for the log.

        For weights that were replaced in a running engine: `reset` the stack, then call this. Transfers in flight end
        as usual. Loads and reservations that wait for a lower tier end with misses.
        """
        stack = self._driver
        assembled = stack._opened()
        check_text("the reason", reason)
        if assembled.joining is not None:
            assembled.joining.stop()
        assembled.plane.hold_back(stack._clock())
        stack._watch.look(assembled.plane.control.lowers, reason)
        stack._carry_out()

    @guard_step
    def announce(self, keys: Sequence[OffloadKey]) -> None:
        """Have `take_events` return once more which tiers have these keys: each is removed and then stored.

        For routers that have forgotten it. Shared tiers have no events.
        """
        assembled = self._driver._opened()
        check_keys(keys, assembled.geometry.num_groups)
        assembled.plane.announce(keys, self._driver._clock())

"""What programs do to a stack without intending harm: cancel, fork, be killed, race for a region, run for ever."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module

from ..attack import Attack, Budget, Tally
from ..machine.belongings import belongings, left_behind


def flat(attack: str, budget: Budget) -> Tally:
    """Run an attack, `module.function` of tests/support, imported only now. This process must have the same files,
    threads, mappings and names afterwards."""
    module, _, function = attack.partition(".")
    run: Callable[[Budget, Tally], Tally] = getattr(import_module(module), function)
    before = belongings()
    tally = run(budget, Tally())
    left = left_behind(before)
    tally.leaks += len(left)
    tally.expect(not left, f"left behind: {left}")
    return tally


ATTACKS = (
    Attack(
        "asyncio cancel",
        "cancelled at every await, after 0-50 ms, by a TaskGroup that fails; the loop closed mid-transfer",
        50, 500, partial(flat, "support_cancels.asyncio_cancel"),
    ),
    Attack(
        "shutdown and fork",
        "programs that end in every way, SIGTERM, Ctrl-C, close() at many points, use after fork; then all is reopened",
        6, 100, partial(flat, "support_lives_ended.shutdown_and_fork"),
    ),
    Attack(
        "steps that raise",
        "an exception, or Ctrl-C, inside a random step of a TierStack and a tier below an engine's "
        "memory, over fs, while they store, load, look up, reserve, reset and close; then the root is opened again",
        24, 2000, partial(flat, "support_steps.steps_that_raise"), shards=4,
    ),
    Attack(
        "leaks and soak",
        "stacks opened and closed, and 100 times as many jobs over I/O that fails: fds, threads, memory flat",
        24, 10_000, partial(flat, "support_soak.leaks_and_soak"),
    ),
)  # fmt: skip

"""What a simulated program says of its blocks beside loading and storing them."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from kvtier.stack.tier_stack import TierStack
from kvtier.types.hints import Demote, KVHint, Pin, Prefetch, Release, Retain
from kvtier.types.keys import OffloadKey

SESSIONS = ("", "agent", "branch")


class HintStream:
    """Says one hint after another to a stack, of blocks that it may have or not. `accepted` counts blocks."""

    def __init__(self, stack: TierStack, keys: Sequence[OffloadKey], rng: Random) -> None:
        self._stack = stack
        self._keys = keys
        self._rng = rng
        self.accepted = 0

    def step(self) -> None:
        """Perhaps a hint."""
        if self._keys and self._rng.random() < 0.4:
            self.accepted += self._stack.hint(self._draw()).accepted

    def _draw(self) -> KVHint:
        rng = self._rng
        session, seconds = rng.choice(SESSIONS), rng.choice((0.1, 2.0, 30.0))
        some = rng.sample(self._keys, rng.randint(0, min(4, len(self._keys))))
        match rng.choice((Retain, Retain, Pin, Prefetch, Prefetch, Demote, Release)):
            case kind if kind in (Retain, Pin):
                return kind(some, seconds, session)
            case kind if kind in (Prefetch, Demote):
                return kind(some, session)
            case _:
                return Release(session)

    def release(self) -> None:
        """Nothing is retained any more."""
        for session in SESSIONS:
            self._stack.hint(Release(session))

"""The journal: whenever what policies were told is taken in, answers are the same."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

from kvtier.policy.reuse.journal import ENTRIES_MAX, Journal
from kvtier.tools.whatif.miss_ratio import PolicyReplay
from kvtier.traces.requests import Request
from kvtier.types.keys import OffloadKey, RequestId, make_key

BLOCKS = 96
REQUESTS = 600
STATE = "kvtier.policy.reuse.journal.ENTRIES_MAX"


def chain(rng: random.Random) -> list[OffloadKey]:
    """A prompt: the front of one of a few documents, and blocks of its own."""
    document, own = rng.randrange(12), rng.randrange(1 << 60)
    names = [(document, at) for at in range(rng.randrange(1, 12))] + [(own, at) for at in range(rng.randrange(5))]
    return [make_key(f"{name}/{at}".encode(), 0) for name, at in names]


def play(between: Callable[[Journal], None] = lambda journal: None) -> tuple[int, int, list[OffloadKey], list[int]]:
    """Requests over a tier; `between` comes after each. Hits, evictions, what it has, and the order of its slots."""
    rng, tier = random.Random(7), PolicyReplay(BLOCKS, "reuse")
    control = tier._control
    for number in range(REQUESTS):
        keys = chain(rng)
        ids = np.zeros(0, np.int64)
        asked = Request("", "", ids, len(keys), len(keys), rng.randrange(900), arrived=2.0 * number)
        tier.use(RequestId(str(number)), asked, keys)
        between(control.models.journal)
    cpu = control.cpu
    cpu.check()
    return tier.hits, cpu.evictions, list(cpu.directory), list(cpu.policy.coldest())


def test_when_it_is_taken_in_makes_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    late, rng = play(), random.Random(3)
    assert late[0] > REQUESTS
    assert late[1] > BLOCKS
    assert play(lambda journal: journal.take_in()) == late
    assert play(lambda journal: journal.take_in() if rng.random() < 0.3 else None) == late
    monkeypatch.setattr(STATE, 0)
    assert play() == late


def test_calls_are_made_in_order() -> None:
    journal, made = Journal(), list[int]()
    for number in range(9):
        assert journal.add(made.append, number) == number + 1
    assert (made, journal.done) == ([], 0)
    journal.take_in()
    assert (made, journal.done) == (list(range(9)), 9)


def test_few_calls_wait() -> None:
    journal, made = Journal(), list[int]()
    for number in range(ENTRIES_MAX + 1):
        journal.add(made.append, number)
    assert made == list(range(ENTRIES_MAX + 1))

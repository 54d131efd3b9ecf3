"""Servers that lie: of wrong types, without an end, without a bound. Each life over one is a process of its own."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ..attack import Attack, Budget, Tally, add_notes
from ..remote.server import without_valkey

_SECONDS = 90.0
"""What a life over a server that lies may take, on a slow machine."""
Life = Callable[[], Any]


def lying_servers(budget: Budget) -> Tally:
    """So many lives, each over another lie, in an order of the seed's. Their memory is compared with an honest
    server's."""
    from support_lies import OBJECT_LIES, VALKEY_LIES
    from support_lying_life import MEMORY_BYTES, life_over

    honest = {kind: _life(kind, None, life_over).peak_bytes for kind in ("valkey", "s3")}
    lies = [("valkey", name, lambda lie=lie: lie) for name, lie in VALKEY_LIES.items()]
    lies += [("s3", name, make) for name, make in OBJECT_LIES.items()]
    random.Random(budget.seed).shuffle(lies)
    tally = Tally()
    for number in range(budget.count):
        kind, name, make = lies[number % len(lies)]
        tally.iterations += 1
        try:
            ended = _life(kind, make(), life_over)
        except AssertionError as error:
            tally.expect(False, f"{kind}, {name}: {str(error)[-300:]}")
            continue
        tally.hangs += ended.seconds > _SECONDS
        tally.over_bound += ended.peak_bytes > honest[kind] + MEMORY_BYTES
        tally.notes[f"lies of {kind}"] += 1
        tally.notes["lives that did not open"] += ended.calls[0] != "opened"
        more = max(0, ended.peak_bytes - honest[kind]) >> 20
        add_notes(tally.notes, {"MiB beyond an honest server, at most": more})
    return tally


def _life(kind: str, lie: Any, life_over: Callable[[Any], Any]) -> Any:
    with _options(kind, lie) as options:
        return life_over(options)


@contextmanager
def _options(kind: str, lie: Any) -> Iterator[Any]:
    from support_lying_http import lying_s3
    from support_lying_valkey import lying_valkey
    from support_valkey import valkey_server

    if kind == "s3":
        with lying_s3() if lie is None else lying_s3(lie) as service:
            yield service.options()
        return
    with valkey_server() as server, lying_valkey(server.process.port, lie or (lambda words: None)) as liar:
        yield server.options(servers=[liar.address])


def bounds_of_answers(budget: Budget) -> Tally:
    """Turn bounds of answers off one at a time; what they keep must break."""
    import pytest
    from support_protections_answers import SWITCHES

    tally = Tally()
    for name, (switch, broken) in SWITCHES.items():
        tally.iterations += 1
        tally.expect(not broken(), f"with {name} it is broken")
        with pytest.MonkeyPatch.context() as monkeypatch:
            switch(monkeypatch)
            tally.expect(broken(), f"without {name} nothing was noticed")
    return tally


ATTACKS = (
    Attack(
        "servers that lie",
        "a Valkey server and an S3 service answer numbers for strings, lists for numbers, listings, values and rules "
        "without an end, a byte now and then, dates and sizes that cannot be; a process each opens, stores, loads, "
        "looks up and resets over them",
        6, 400, lying_servers, missing=without_valkey,
    ),
    Attack(
        "bounds of answers", "one bound of what servers say turned off at a time; that must be noticed",
        7, 7, bounds_of_answers, missing=without_valkey,
    ),
)  # fmt: skip

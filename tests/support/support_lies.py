"""What servers say that lie, for tests and for the fault suite: of wrong types, without an end, without a bound."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from email.utils import formatdate
from itertools import count
from typing import Any

from support_lying_http import Asked, chunked, listing, reply
from support_lying_http import Lie as HTTPLie
from support_lying_valkey import Command, Lie, bulk, for_ever

ZEROS = bytes(1 << 16)
TRICKLE_SECONDS = 0.2
TIB = 1 << 40
SLOTS_HUGE, ONE_SLOT = 10**9, 1


def _on(names: Mapping[bytes, bytes | Callable[[], Iterator[bytes]]]) -> Lie:
    """Answers by the words that a command begins with. What a tier tries when it opens is answered truly."""

    def lie(words: Command) -> bytes | Iterator[bytes] | None:
        line = b" ".join(words).upper()
        answer = next((answer for name, answer in names.items() if line.startswith(name)), None)
        if answer is None or b"PROBE" in line or line.startswith(b"EVAL RETURN 0"):
            return None
        return answer if isinstance(answer, bytes) else answer()

    return lie


def trickled(front: bytes) -> Iterator[bytes]:
    """A byte now and then, so that no wait for one is long."""
    yield front
    while True:
        time.sleep(TRICKLE_SECONDS)
        yield b"0"


def slots(*ranges: object) -> bytes:
    """An answer to CLUSTER SLOTS, given first, last, id and port of each range."""
    return b"*%d\r\n" % len(ranges) + b"".join(
        b"*3\r\n:%d\r\n:%d\r\n*3\r\n%s:%d\r\n%s" % (first, last, bulk(b"127.0.0.1"), port, bulk(node))
        for first, last, node, port in ranges  # type: ignore[attr-defined]
    )


INFO_LIES: dict[str, Lie] = {
    "a number for INFO": _on({b"INFO MEMORY": b":5\r\n"}),
    "no INFO": _on({b"INFO MEMORY": b"_\r\n"}),
    "a list for INFO": _on({b"INFO MEMORY": b"*1\r\n:1\r\n"}),
    "no number of bytes": _on({b"INFO MEMORY": bulk(b"maxmemory:abc\r\n")}),
    "5,000 digits of bytes": _on({b"INFO MEMORY": bulk(b"maxmemory:" + b"9" * 5000 + b"\r\n")}),
    "more bytes than there are": _on({b"INFO MEMORY": bulk(b"maxmemory:" + b"9" * 50 + b"\r\n")}),
    "less than no bytes": _on({b"INFO MEMORY": bulk(b"maxmemory:-5\r\n")}),
    "32 MiB of INFO": _on({b"INFO MEMORY": bulk(b"maxmemory:5000000\r\n" * (1 << 20))}),
    "no number of evictions": _on({b"INFO STATS": bulk(b"evicted_keys:all of them\r\n")}),
    "no marker": _on({b"EVAL": b"_\r\n"}),
    "a real number for a marker": _on({b"EVAL": b",1.5\r\n"}),
    "10^12 for a marker": _on({b"EVAL": b":1000000000000\r\n"}),
    "a list for a marker": _on({b"EVAL": b"*1\r\n:3\r\n"}),
    "a mebibyte for a marker": _on({b"EVAL": bulk(b"9" * (1 << 20))}),
}
"""From which a tier does not open, or opens without what they say."""

BLOCK_LIES: dict[str, Lie] = {
    "a string for values": _on({b"MGET": bulk(b"abc")}),
    "numbers for values": _on({b"MGET": b"*1\r\n:1\r\n"}),
    "more values than names": _on({b"MGET": b"*9\r\n" + bulk(b"abc") * 9}),
    "a map for values": _on({b"MGET": b"%1\r\n" + bulk(b"a") * 2}),
    "a string for a length": _on({b"STRLEN": bulk(b"abc")}),
    "less than no length": _on({b"STRLEN": b":-3\r\n"}),
    "no length": _on({b"STRLEN": b"_\r\n"}),
    "a number for OK": _on({b"SET": b":1\r\n"}),
    "nothing for OK": _on({b"SET": b"_\r\n"}),
    "a list for OK": _on({b"SET": b"*2\r\n:1\r\n:2\r\n"}),
}
"""After which a tier is open and goes on."""

ENDLESS_VALKEY_LIES: dict[str, Lie] = {
    "values without an end": _on({b"MGET": lambda: for_ever(b"*1\r\n$4000000000\r\n", ZEROS)}),
    "values that trickle": _on({b"MGET": lambda: trickled(b"*1\r\n$100000\r\n")}),
    "lengths that trickle": _on({b"STRLEN": lambda: trickled(b":")}),
    "a marker that trickles": _on({b"EVAL": lambda: trickled(b"$1000\r\n")}),
}

VALKEY_LIES = (
    INFO_LIES | BLOCK_LIES | {name: lie for name, lie in ENDLESS_VALKEY_LIES.items() if name != "values without an end"}
)
"""Those whose cost is bounded here. A value without an end costs what arrives in the time of a request: the library
keeps it, and knows no bound."""


def cluster_lies(port: int) -> dict[str, Lie]:
    """What the only node of a cluster, which listens there, says of its slots once a client is connected."""
    half = SLOTS_HUGE // 2
    answers = {
        "10^9 slots": slots((0, SLOTS_HUGE, b"a", port)),
        "slots from 10^9 on": slots((half, SLOTS_HUGE, b"a", port)),
        "a range that ends before it begins": slots((16383, 0, b"a", port)),
        "a node whose slots another one has too": slots((0, 16383, b"a", port), (0, 16383, b"b", port)),
        "a node with no slot of its own": slots((5, 5, b"a", port), (0, 16383, b"b", port)),
        "16,384 nodes": slots(*((slot, slot, b"%d" % slot, port) for slot in range(16384))),
        "a number for slots": b":5\r\n",
        "numbers for ranges": b"*2\r\n:1\r\n:2\r\n",
        "ranges without nodes": b"*1\r\n*2\r\n:0\r\n:16383\r\n",
        "a node without an id": b"*1\r\n*3\r\n:0\r\n:16383\r\n*1\r\n:1\r\n",
        "a mebibyte for an id": slots((0, 16383, b"x" * (1 << 20), port)),
    }
    return {name: _after_the_library(answer, slots((0, 16383, b"a" * 40, port))) for name, answer in answers.items()}


def _after_the_library(answer: bytes, honest: bytes) -> Lie:
    """The library reads CLUSTER SLOTS itself when it connects, and is told the truth."""

    def lie(words: Command) -> bytes | None:
        if [word.upper() for word in words[:2]] != [b"CLUSTER", b"SLOTS"]:
            return None
        state["asked"] += 1
        return honest if state["asked"] % 2 else answer

    state: dict[str, Any] = {"asked": 0}
    return lie


# ---- S3


def _block(asked: Asked) -> bool:
    return "/b/" in asked.name and "probe" not in asked.name


def _markers_without_end() -> HTTPLie:
    numbers = count()

    def lie(asked: Asked) -> bytes | None:
        if not asked.lists:
            return None
        page = next(numbers)
        epochs = range(1000 * page, 1000 * page + 1000)
        names = [f"kvtier/m/{'0' * 16}/{epoch:020d}.{'0' * 16}" for epoch in epochs]
        return reply(listing(names, token=f"page{page}"))

    return lie


def _empty_pages() -> HTTPLie:
    numbers = count()
    return lambda asked: reply(listing([], token=f"page{next(numbers)}")) if asked.lists else None


def _marker(**more: Any) -> HTTPLie:
    name = f"kvtier/m/{'0' * 16}/{more.pop('epoch', 0):020d}.{'0' * 16}"
    return lambda asked: reply(listing([name], **more)) if asked.lists else None


def _value(asked: Asked) -> Iterator[bytes] | None:
    return object_without_end(asked) if asked.method == "GET" and _block(asked) else None


def object_without_end(asked: Asked) -> Iterator[bytes]:
    """An answer to a request for the front of an object, with what it asked for and then all that follows."""
    written, front = formatdate(usegmt=True), asked.range.replace("=", " ")
    stated = {"Content_Length": TIB, "Content_Range": f"{front}/{TIB}", "Last_Modified": written, "ETag": '"0"'}
    yield reply(b"", "206 Partial Content", **stated)
    while True:
        yield ZEROS


OBJECT_LIES: dict[str, Callable[[], HTTPLie]] = {
    "markers without an end": _markers_without_end,
    "empty pages without an end": _empty_pages,
    "a marker of the year 262000": lambda: _marker(written="+262000-01-01T00:00:00.000Z"),
    "a marker of no day": lambda: _marker(written="yesterday"),
    "a marker of 2^70 bytes": lambda: _marker(size=1 << 70),
    "an epoch of 20 digits": lambda: _marker(epoch=10**20 - 1),
    "no XML": lambda: lambda asked: reply(b"\0" * 1000) if asked.lists else None,
    "an object without an end": lambda: _value,
    "a lifecycle rule that trickles": lambda: (
        lambda asked: (
            trickled(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n") if "lifecycle" in asked.query else None
        )
    ),
    "headers of a lifecycle rule that trickle": lambda: (
        lambda asked: trickled(b"HTTP/1.1 200 OK\r\nX-Filler: ") if "lifecycle" in asked.query else None
    ),
    "a lifecycle rule without an end": lambda: (
        lambda asked: chunked(iter(lambda: ZEROS, None)) if "lifecycle" in asked.query else None
    ),
    "no HTTP for a lifecycle rule": lambda: lambda asked: b"\0" * 1000 if "lifecycle" in asked.query else None,
    "a lifecycle rule of 10^5 levels": lambda: (
        lambda asked: reply(b"<a>" * 10**5 + b"</a>" * 10**5) if "lifecycle" in asked.query else None
    ),
    "a size of 2^70": lambda: (
        lambda asked: reply(b"", Content_Length=1 << 70) if asked.method == "HEAD" and _block(asked) else None
    ),
    "a block of the year 99999": lambda: (
        lambda asked: reply(b"", Last_Modified="Mon, 01 Jan 99999 00:00:00 GMT") if asked.method == "HEAD" else None
    ),
}

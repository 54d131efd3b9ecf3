"""Attacks on stack files: whatever a file contains, it is refused at once, with one line that names the place."""

from __future__ import annotations

import random
import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from kvtier.config import load_stack
from kvtier.errors import ConfigError
from kvtier.tier.registry import Backends, discover

from ..attack import Attack, Budget, Tally

LIMIT_SECONDS = 0.1
ROUNDS = 4
LINE_MAX = 1000
TEXT_MAX = 40_000
FULL = 64 << 10
CPU = "tiers:\n  - {type: cpu, cpu_bytes_to_use: 1GiB}\n"
PLACE = re.compile(r"line \d+|byte \d+|tiers|stack\.yaml|the text|a stack file|^[\w.-]+: |^'.+: ")
MORE = "... and more; correct these first"

Hostile = Callable[[random.Random], str | bytes]


def _fill(rng: random.Random, piece: str) -> str:
    """A piece over and over: below the limit of a file, up to it, or far beyond it."""
    size = rng.choice([8 << 10, 16 << 10, FULL, FULL, 300 << 10])
    return (piece * (size // len(piece) + 1))[: size - rng.randrange(8)]


def _depth(rng: random.Random) -> int:
    return rng.choice([17, 18, 100, 1000, 5000, 20_000])


def _keys(rng: random.Random, count: int, stem: str) -> str:
    first = rng.randrange(10_000)
    return "".join(f"{stem}{first + number}: {rng.randrange(9)}\n" for number in range(count))


def _bomb(rng: random.Random) -> str:
    levels = rng.randrange(2, 12)
    lines = ["l0: &l0 [x, x, x]"]
    lines += [f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * rng.randrange(2, 10))}]" for n in range(1, levels)]
    return "\n".join(lines)


def _blank(rng: random.Random, text: str, bad: bytes) -> bytes:
    """A valid file with some bytes in it that are none of UTF-8."""
    at = rng.randrange(len(text))
    return text[:at].encode() + bad + text[at:].encode()


def _tier(rng: random.Random, options: str) -> str:
    """A stack whose last tier is hostile; others stand before it now and then."""
    return CPU + "  - {type: fs, roots: [/a], capacity: 1GiB}\n" * rng.randrange(3) + f"  - {{{options}}}\n"


def _fs(rng: random.Random, **values: str) -> str:
    fields = {"type": "fs", "roots": "[/x]", "capacity": "1GiB"} | values
    return _tier(rng, ", ".join(f"{key}: {value}" for key, value in fields.items()))


def _noise(rng: random.Random) -> str:
    """Characters of YAML in any order. Those that happen to make a valid stack file are left out."""
    signs = "[]{}:,-?&*!|>'\"%@`#~ \n\t" + "ab01."
    return "".join(rng.choices(signs, k=rng.randrange(1, 20_000))) + "\n]"


HOSTILE: dict[str, Hostile] = {
    "billion laughs": _bomb,
    "anchor": lambda rng: CPU + f"namespace: &a{rng.randrange(99)} x\n",
    "many anchors": lambda rng: _fill(rng, "&a "),
    "many aliases": lambda rng: _fill(rng, "*a "),
    "merge key": lambda rng: f"x: &x {{a: {rng.randrange(9)}}}\ny: {{<<: *x}}\n{CPU}",
    "long anchor": lambda rng: "&" + _fill(rng, "a"),
    "deep lists": lambda rng: "[" * (depth := _depth(rng)) + "]" * depth,
    "deep mappings": lambda rng: "{a: " * (depth := _depth(rng)) + "1" + "}" * depth,
    "deep and open": lambda rng: "[" * _depth(rng),
    "deep blocks": lambda rng: "- " * _depth(rng),
    "deep keys": lambda rng: "? " * _depth(rng),
    "deep by indentation": lambda rng: "".join(" " * n + "a:\n" for n in range(rng.randrange(18, 300))),
    "deep in a tier": lambda rng: _tier(rng, "type: cpu, x: " + "[" * _depth(rng)),
    "duplicate key": lambda rng: CPU + "namespace: a\n" * rng.randrange(2, 2000),
    "duplicate key in a tier": lambda rng: _tier(rng, "type: fs, type: fs"),
    "python tag": lambda rng: "a: !!python/object/apply:os.system [" + "ls" * rng.randrange(1, 99) + "]",
    "own tag": lambda rng: CPU + f"namespace: !t{rng.randrange(99)} x",
    "standard tag": lambda rng: CPU + "namespace: !!" + rng.choice(["str x", "binary aGk=", "null x", "int 5"]),
    "many tags": lambda rng: _fill(rng, "!a "),
    "long tag": lambda rng: "!" + _fill(rng, "a"),
    "directives": lambda rng: "%YAML 1.2\n" * rng.randrange(1, 3000) + f"---\n{CPU}",
    "tag directives": lambda rng: "".join(f"%TAG !{n}! x\n" for n in range(rng.randrange(1, 3000))),
    "ten megabytes": lambda rng: "a" * 10_000_000,
    "ten megabytes of lines": lambda rng: CPU + f"k{rng.randrange(9)}: 1\n" * 1_400_000,
    "not UTF-8": lambda rng: _blank(rng, CPU, rng.choice([b"\xff", b"\xc3\x28", b"\xed\xa0\x80", b"\xf8", b"\x80"])),
    "UTF-16": lambda rng: CPU.encode(rng.choice(["utf-16", "utf-16-le", "utf-16-be", "utf-32"])),
    "zero byte": lambda rng: _blank(rng, CPU, b"\0"),
    "control signs": lambda rng: _blank(rng, CPU, bytes([rng.choice([1, 7, 8, 14, 27, 31, 127])])),
    "random bytes": lambda rng: rng.randbytes(rng.randrange(1, 9000)) + b"\xff",
    "random signs": _noise,
    "NaN": lambda rng: CPU + f"lookup_timeout_seconds: {rng.choice(['.nan', '.inf', '-.inf', '1e999', '-1e999'])}\n",
    "NaN in words": lambda rng: CPU + f"lookup_timeout_seconds: {rng.choice(['nan', 'inf', '-inf', 'Infinity'])}\n",
    "endless number": lambda rng: CPU + f"block_size_factor: {'9' * rng.randrange(21, 5000)}\n",
    "endless fraction": lambda rng: CPU + f"load_timeout_seconds: 1e{'9' * rng.randrange(5, 5000)}\n",
    "negative size": lambda rng: _fs(rng, capacity=f"-{rng.randrange(1, 99)}"),
    "no size": lambda rng: _fs(rng, capacity=rng.choice(["1 banana", "0", "[]", "true", "1e9", "1GiBGiB", "''"])),
    "long size": lambda rng: _fs(rng, capacity="1" * rng.randrange(21, 9000) + "GiB"),
    "root above": lambda rng: _fs(rng, roots=f"[/srv/{'../' * rng.randrange(1, 3000)}etc]"),
    "root relative": lambda rng: _fs(rng, roots=f"[{'../' * rng.randrange(3000)}x]"),
    "root with a zero byte": lambda rng: _fs(rng, roots='["/a\\0b"]'),
    "roots twice": lambda rng: _fs(rng, roots="[/a, /a/, /./a]"),
    "too many roots": lambda rng: _fs(rng, roots=f"[{', '.join(f'/r{n}' for n in range(rng.randrange(65, 2000)))}]"),
    "roots of lists": lambda rng: _fs(rng, roots=f"[{'[],' * rng.randrange(1, 3000)}]"),
    "name above": lambda rng: _fs(rng, name=f"{'../' * rng.randrange(1, 9)}passwd"),
    "name with signs": lambda rng: _fs(rng, name='"' + rng.choice(["a b", "\\e[2J", "a\\nb", "\\0", "\\u202e"]) + '"'),
    "long name": lambda rng: _fs(rng, name="a" * rng.randrange(65, TEXT_MAX)),
    "long namespace": lambda rng: f"namespace: {'n' * rng.randrange(257, TEXT_MAX)}\n{CPU}",
    "module as type": lambda rng: _tier(
        rng, rng.choice(["type: os", "type: os.system", "type: 'kvtier_fs:FSBackend'"])
    ),
    "type that is none": lambda rng: _tier(rng, "type: " + rng.choice(["[fs]", "{a: fs}", "5", "true", "", "1.5"])),
    "many unknown keys": lambda rng: _keys(rng, rng.randrange(1, 2500), rng.choice(["k", "namespac", "tiers"])) + CPU,
    "many unknown keys of a tier": lambda rng: (
        "tiers:\n- type: cpu\n" + "".join(f"  cpu_bytes_to_us{n}: 1\n" for n in range(rng.randrange(1, 1500)))
    ),
    "keys that break lines": lambda rng: CPU + f'"a\\nb\\e[31m{rng.randrange(99)}": 1\n',
    "a long key": lambda rng: f"? {'k' * rng.randrange(2000, TEXT_MAX)}\n: 1\n{CPU}",
    "many tiers": lambda rng: "tiers:\n" + "- {type: cpu, cpu_bytes_to_use: 1GiB}\n" * rng.randrange(2, 1500),
    "many unknown tiers": lambda rng: "tiers:\n" + f"- type: t{rng.randrange(99)}\n" * rng.randrange(1, 2000),
    "tiers that are none": lambda rng: "tiers: " + rng.choice(["5", "fs", "{}", "[]", "[[]]", "null", "{a: {}}"]),
    "tiers of nothing": lambda rng: "tiers: [" + "[]," * rng.randrange(1, 4000) + "]",
    "no mapping": lambda rng: rng.choice(["5", "- 1", "text", "''", "", "null", "[]", "# nothing"]),
    "two documents": lambda rng: CPU + f"---\n{CPU}" * rng.randrange(1, 500),
    "key that is no text": lambda rng: CPU + rng.choice(["1: a", "true: a", "[a]: b", "? {a: 1}\n: b", "null: x"]),
    "only spaces and lines": lambda rng: _fill(rng, rng.choice(["\n", " \n", "# x\n", " "])),
    "escapes": lambda rng: f'"{_fill(rng, chr(92) + "u0041")}"',
    "block text": lambda rng: CPU + rng.choice(["x: |\n", "x: >\n"]) + _fill(rng, " b\n"),
    "many values": lambda rng: "a: [" + _fill(rng, rng.choice(["1,", "{},", "'',", "~,"])),
    "plain lines": lambda rng: "a: " + _fill(rng, "b\n "),
    "lines that may be keys": lambda rng: _fill(rng, "a\n"),
    "open quote": lambda rng: CPU + "namespace: " + rng.choice("'\"") + _fill(rng, "x "),
    "tabs": lambda rng: "tiers:\n" + "\t" * rng.randrange(1, 5000) + "- type: cpu\n",
}
"""By name, what makes a hostile file of a kind. None of them is ever a valid stack."""


class Refused(NamedTuple):
    """How a file was refused: seconds by the clock, of the processor, and the message (empty: accepted as a stack)."""

    seconds: float
    busy_seconds: float
    words: str


def _refusal(path: Path, backends: Backends) -> Refused:
    begun, busy = time.perf_counter(), time.process_time()
    words = ""
    try:
        load_stack(path, backends)
    except ConfigError as error:
        words = str(error)
    return Refused(time.perf_counter() - begun, time.process_time() - busy, words)


def _median(path: Path, backends: Backends) -> Refused:
    """The median of three. It is measured again while it is too slow, a few times, because other processes use this
    machine too."""
    for _ in range(ROUNDS):
        tries = [_refusal(path, backends) for _ in range(3)]
        found = Refused(statistics.median(one.seconds for one in tries),
                        statistics.median(one.busy_seconds for one in tries), tries[0].words)  # fmt: skip
        if found.seconds < LIMIT_SECONDS:
            break
    return found


def _complaint(words: str) -> str:
    """What is wrong with how a file was refused; empty if nothing is."""
    if not words:
        return "was taken for a stack"
    lines = words.split("\n")
    if not all(line.isprintable() and 0 < len(line) <= LINE_MAX for line in lines):
        return f"is refused in lines that cannot be read: {words[:200]!r}"
    return (
        ""
        if all(PLACE.search(line) for line in lines if line != MORE)
        else f"is refused without a place: {words[:200]!r}"
    )


def _judge(tally: Tally, found: Refused, where: str) -> None:
    """A refusal is too slow if it is so in every try, unless other processes on this machine take the time."""
    late = found.seconds >= LIMIT_SECONDS
    if late and found.busy_seconds < LIMIT_SECONDS:
        tally.notes["late on a busy machine"] += 1
    elif late:
        tally.hangs += 1
        tally.expect(
            False, f"{where}: took {found.seconds * 1000:.0f} ms, {found.busy_seconds * 1000:.0f} ms of them busy"
        )
    complaint = _complaint(found.words)
    tally.expect(not complaint, f"{where}: {complaint}")


def hostile_configuration(budget: Budget) -> Tally:
    """Every kind in turn, each from a seed of its own."""
    tally, backends = Tally(), discover()
    for name in backends.names:
        backends.get(name)  # the first use of a backend imports it, which is not what is measured here
    kinds, path = list(HOSTILE), budget.folder / "stack.yaml"
    slowest = busiest = 0.0
    for number in range(budget.count):
        kind, seed = kinds[number % len(kinds)], budget.seed + number
        made = HOSTILE[kind](random.Random(f"{kind}/{seed}"))
        path.write_bytes(made if isinstance(made, bytes) else made.encode())
        found = _median(path, backends)
        _judge(tally, found, f"{kind}, seed {seed}")
        slowest, busiest = max(slowest, found.seconds), max(busiest, found.busy_seconds)
        tally.iterations += 1
    tally.notes["kinds"] = min(len(kinds), budget.count)
    tally.notes["slowest, microseconds"] = round(slowest * 1e6)
    tally.notes["most processor time, microseconds"] = round(busiest * 1e6)
    return tally


ATTACKS = (
    Attack(
        name="hostile configuration",
        how="stack files made from seeds (YAML bombs, nesting, duplicate keys, tags, 10 MB, NaN, ../, not UTF-8, ...): "
        "a typed error that names the place, the median of three below 100 ms in one of "
        "four tries; on a busy machine below 100 ms of processor time, and counted as late",
        normal=210,
        long=5_000,
        attack=hostile_configuration,
        minutes=5,
    ),
)

"""Every public call of a stack with every argument replaced by what it must not be, one at a time."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from kvtier.types.gpu_runs import GPURuns
from kvtier.types.hints import Demote, Pin, Prefetch, Release, Retain
from kvtier.types.jobs import GPUGroup, JobKind, TransferJob
from kvtier.types.keys import GroupIndex, OffloadKey, block_keys, make_key
from kvtier.types.requests import RequestInfo

HASHES = [bytes([40 + number]) * 32 for number in range(4)]


class Nothing:
    """Of no type that a call takes."""


def bad_values() -> dict[str, object]:
    """Fresh for each call: a generator is used up by it."""
    return {
        "None": None,
        "True": True,
        "-1": -1,
        "3": 3,
        "1.5": 1.5,
        "10**400": 10**400,
        "-(10**400)": -(10**400),
        "2**63": 2**63,
        "nan": math.nan,
        "inf": math.inf,
        "-inf": -math.inf,
        "1e308": 1e308,
        "float32": np.float32("nan"),
        "text": "abc",
        "no text": "",
        "bytes": b"abcdefgh",
        "no bytes": b"",
        "bytearray": bytearray(8),
        "an object": Nothing(),
        "a class": Nothing,
        "a function": bad_values,
        "a generator": (each for each in block_keys(HASHES)),
        "a dict": dict.fromkeys(block_keys(HASHES), 1),
        "a set": set(block_keys(HASHES[:1])),
        "a list of ints": [1, 2],
        "a list of lists": [[1], [2]],
        "a list of text": ["abcdefgh"],
        "a list of floats": [0.5, math.nan],
        "a list of bools": [True, False],
        "a list of huge ints": [10**30],
        "a list of no bytes": [b""],
        "a list of None": [None],
        "a key without a hash": [make_key(b"", 0)],
        "a key of another group": block_keys(HASHES[:1], 7),
        "a key of a group that cannot be": block_keys(HASHES[:1], 10**9),
        "a key, then an int": [*block_keys(HASHES[:1]), 3],
        "an array": np.zeros((2, 2)),
        "pairs of None": [(None, None)],
        "pairs of three": [(block_keys(HASHES[:1]), [0], [0])],
    }


def some_keys() -> list[OffloadKey]:
    return block_keys(HASHES)


def some_job(kind: JobKind = JobKind.STORE, job_id: int = 1 << 40) -> TransferJob:
    return TransferJob(job_id, kind, (GPUGroup(GroupIndex(0), tuple(some_keys()), GPURuns.whole(range(4))),), None)


@dataclass(frozen=True)
class Call:
    """One call that is wrong in one place."""

    method: str
    where: str
    arguments: Mapping[str, object]

    def __str__(self) -> str:
        return f"{self.method}({self.where})"


def wrong_calls(face: type, good: Mapping[str, Callable[[], dict[str, object]]], skipped: set[str]) -> Iterator[Call]:
    """Every public method of a class that takes arguments, and is not skipped, needs good ones; each is replaced."""
    for name, method in inspect.getmembers(face, callable):
        if name.startswith("_") or name in skipped or inspect.isclass(method):
            continue
        parameters = inspect.signature(method).parameters.values()
        names = [each.name for each in parameters if each.name != "self" and each.kind is not each.VAR_POSITIONAL]
        if not names:
            continue
        assert name in good, f"{face.__name__}.{name} has no good arguments here: say some, or why it is skipped"
        for argument in names:
            for what in bad_values():
                yield Call(name, f"{argument}={what}", {**good[name](), argument: bad_values()[what]})
    for name in sorted(good):
        for argument, value in good[name]().items():
            if isinstance(value, (Retain, Pin, Prefetch, Demote, Release, RequestInfo, TransferJob)):
                yield from _wrong_fields(name, good[name], argument, value)


def _wrong_fields(name: str, good: Callable[[], dict[str, object]], argument: str, value: Any) -> Iterator[Call]:
    """A value object whose fields are wrong, each alone; of a job those of its group and runs as well."""
    values = [value]
    if argument == "hint":
        keys = some_keys()
        values = [Retain(keys, 3.0, "s"), Pin(keys, 3.0, "s"), Prefetch(keys, "s"), Demote(keys, "s"), Release("s")]
    for each in values:
        for field in fields(each):
            for what, bad in bad_values().items():
                if field.init and field.name not in ("epoch", "formats", "urgent"):
                    where = f"{argument}={type(each).__name__}({field.name}={what})"
                    yield Call(name, where, {**good(), argument: replace(each, **{field.name: bad})})
    if isinstance(value, TransferJob):
        (group,) = value.gpu_groups
        for field in ("group", "keys", "runs"):
            for what, bad in bad_values().items():
                wrong = replace(value, groups=(replace(group, **{field: bad}),))
                yield Call(name, f"{argument}=TransferJob(GPUGroup({field}={what}))", {**good(), argument: wrong})

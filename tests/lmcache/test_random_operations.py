"""Random operations of an adapter while everything below goes wrong: no wrong byte, and each task ends."""

from __future__ import annotations

import random
import time
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from support_lmcache import Memory, controllers, object_key, params

from kvtier.testing.faults import Fault, FaultKind, FaultyBackend, SeededFaults
from kvtier.tier_api.registry import discover
from kvtier.types.jobs import JobKind

pytestmark = [pytest.mark.lmcache, pytest.mark.filterwarnings("ignore")]  # what LMCache warns of is not ours

OPERATIONS = 250
OBJECTS = 120
PLACES = 16
SIZES = [64 << 10, 100_000, 40_000, 4096]
LUCK = [
    (0.03, Fault(FaultKind.FAIL)),
    (0.03, Fault(FaultKind.CORRUPT, JobKind.LOAD)),
    (0.02, Fault(FaultKind.MISSING, JobKind.LOAD)),
    (0.02, Fault(FaultKind.DROP, JobKind.STORE)),
    (0.02, Fault(FaultKind.LOSE, JobKind.STORE)),
    (0.01, Fault(FaultKind.RAISE)),
    (0.005, Fault(FaultKind.HOLD)),
]


@pytest.fixture
def faulty(monkeypatch) -> list[FaultyBackend]:
    """Every backend that is made from here on goes wrong as planned; the last one made is the one that serves."""
    made: list[FaultyBackend] = []
    backends = discover()

    class Planned:
        def get(self, name: str) -> Any:
            kind = backends.get(name)

            def make(options: Any) -> FaultyBackend:
                inner = kind(options)
                for call in ("load", "store"):  # what is held is I/O that has begun: it is done, however late
                    move = getattr(inner, call)
                    setattr(inner, call, lambda job, move=move: move(replace(job, deadline=None)))
                made.append(FaultyBackend(inner))
                return made[-1]

            return make

    monkeypatch.setattr("kvtier.engine_memory.tier.discover", Planned)
    return made


def test_no_byte_is_ever_wrong(faulty, tmp_path, seed):
    rng = random.Random(seed)
    room = max(SIZES)
    memory = Memory(PLACES * room)
    keys = params(tmp_path, capacity="16MiB", piece_bytes="64KiB", job_timeout_seconds=0.5, lease_seconds=0.5)
    counts: Counter[str] = Counter()
    slowest = 0.0
    with controllers(memory, keys) as used:
        for number in range(OPERATIONS):
            if number % 100 == 0:
                faulty[-1].plan = SeededFaults(seed + number, LUCK if number % 300 else [])
            if rng.random() < 0.05:
                used.adapter._tier.thread.call_soon(faulty[-1].release)
            numbers = rng.sample(range(OBJECTS), rng.randint(1, PLACES))
            sizes = [SIZES[each % len(SIZES)] for each in numbers]
            names = [object_key(each, object_group_id=each % len(SIZES)) for each in numbers]
            places = [at * room for at in rng.sample(range(PLACES), len(numbers))]
            began = time.monotonic()
            kind = rng.random()
            if kind < 0.4:
                filled = zip(places, sizes, numbers, strict=True)
                stored = used.store(names, [memory.object(at, size, each) for at, size, each in filled])
                counts["stored" if stored else "not stored"] += 1
            elif kind < 0.45:
                used.adapter.delete(names)
            elif kind < 0.5:
                used.adapter.submit_touch(names)
            else:
                found = used.look_up(names)
                memory.tensor.zero_()
                targets = [memory.object(at, size) for at, size in zip(places, sizes, strict=True)]
                loaded = used.load(names, targets)
                before = memory.tensor.clone()
                for each, at, size, there in zip(numbers, places, sizes, loaded, strict=True):
                    assert not there or memory.holds(at, size, each), f"operation {number}: object {each} is wrong"
                if rng.random() < 0.9:  # otherwise its lease ends by itself
                    used.adapter.submit_unlock([name for name, there in zip(names, found, strict=True) if there])
                counts["found"] += sum(found)
                counts["loaded"] += sum(loaded)
                assert memory.tensor.equal(before), "memory is left alone once a task has ended"
            slowest = max(slowest, time.monotonic() - began)
        counts["faults"] = faulty[-1].injected.total()
        print(dict(counts), f"slowest {slowest:.2f} s")
        used.adapter._tier.thread.call_soon(faulty[-1].release)
        used.adapter._tier.plane.check_integrity()
    assert counts["faults"] > 30
    assert counts["loaded"] > 100
    assert counts["found"] > counts["loaded"], "faults hit loads"

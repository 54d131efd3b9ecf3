"""Random operations of an adapter while everything below goes wrong: no wrong byte, and each task ends."""

from __future__ import annotations

import random
import time
from collections import Counter

import pytest
from support_faulty_tiers import CHANCES
from support_lmcache import Memory, controllers, object_key, params

from kvtier.testing.faults import SeededFaults

pytestmark = [pytest.mark.lmcache, pytest.mark.filterwarnings("ignore")]  # what LMCache warns of is not ours

OBJECTS = 120
PLACES = 16
SIZES = [64 << 10, 100_000, 40_000, 4096]


@pytest.mark.parametrize("operations", [250, pytest.param(2000, marks=pytest.mark.long)])
def test_no_byte_is_ever_wrong(operations, faulty, tmp_path, seed):
    rng = random.Random(seed)
    room = max(SIZES)
    memory = Memory(PLACES * room)
    keys = params(tmp_path, capacity="16MiB", piece_bytes="64KiB", job_timeout_seconds=0.5, lease_seconds=0.5)
    counts: Counter[str] = Counter()
    slowest = 0.0
    with controllers(memory, keys) as used:
        for number in range(operations):
            if number % 100 == 0:
                faulty[-1].plan = SeededFaults(seed + number, CHANCES if number % 300 else [])
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

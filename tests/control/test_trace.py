"""LRU and ARC are the textbook ones through the whole control plane too: hit rates of a CPU tier on a real trace.

Every job ends at once. A request hits its longest prefix in rows and loads it, stores the rest, and says what it used.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
from support_control import cpu_setup, plane_settings
from support_counts import full_alone
from support_paths import TRACES

from kvtier.control.plane.control_plane import ControlPlane
from kvtier.tier.contract import LookupResult
from kvtier.types.gpu_runs import GPURuns
from kvtier.types.jobs import LOADED, STORED, GPUGroup, JobKind, JobResult, TransferJob
from kvtier.types.keys import GroupIndex, JobId, OffloadKey, make_key

TRACE = TRACES / "conversation.jsonl"
REFERENCES = 288_500
pytestmark = [
    pytest.mark.trace,
    pytest.mark.skipif(not TRACE.is_file(), reason="no trace: put conversation.jsonl into ../shared/traces"),
]


@pytest.fixture(scope="module")
def requests() -> list[list[OffloadKey]]:
    with TRACE.open() as lines:
        return [[make_key(i.to_bytes(16, "big"), 0) for i in json.loads(line)["hash_ids"]] for line in lines]


class Driver:
    """An engine whose copies take no time; all its jobs name GPU blocks 0, 1, 2, ..."""

    def __init__(self, rows: int, policy: str) -> None:
        self.plane = ControlPlane(cpu_setup(rows, policy), [], settings=plane_settings(events_max=0))
        self.runs: dict[int, GPURuns] = {}
        self.jobs = 0

    def run(self, kind: JobKind, keys: list[OffloadKey]) -> list:
        """The outcomes of a job that is done at once, with every copy it needed."""
        plane = self.plane
        self.jobs += 1
        runs = self.runs.setdefault(len(keys), GPURuns.whole(np.arange(len(keys))))
        plane.submit(TransferJob(JobId(self.jobs), kind, (GPUGroup(GroupIndex(0), tuple(keys), runs),)), 0.0)
        done = LOADED if kind is JobKind.LOAD else STORED
        results: list[JobResult] = []
        while not results:
            decided = plane.collect()
            for emission in decided.jobs:
                assert emission.position == 0
                plane.finish(JobResult.uniform(emission.job, done), 0.0)
            plane.pump(0.0)
            results += decided.results
        (result,) = results
        return [outcome for group in result.outcomes for outcome in group]

    def serve(self, keys: list[OffloadKey], loads: bool) -> int:
        """One request: load (or only touch) what hits, store the rest, touch what hit. Returns the hits."""
        plane = self.plane
        found = plane.lookup(keys, 0.0)
        hits = next((i for i, result in enumerate(found) if result is not LookupResult.HIT), len(keys))
        if hits and loads:
            assert set(self.run(JobKind.LOAD, keys[:hits])) == {LOADED}
        elif hits:
            plane.touch(keys[:hits])
        if hits < len(keys):
            self.run(JobKind.STORE, keys[hits:])
        plane.touch(keys[:hits])
        return hits


def hits(requests: list[list[OffloadKey]], policy: str, rows: int, loads: bool = False) -> int:
    driver = Driver(rows, policy)
    count = sum(driver.serve(keys, loads) for keys in requests)
    assert (len(requests), sum(map(len, requests))) == (12_031, REFERENCES)
    driver.plane.check_integrity()
    assert driver.plane.control.cpu.used_bytes == driver.plane.control.cpu_spec.opened.capacity_bytes
    return count


@pytest.mark.parametrize(
    ("rows", "loads", "expected"), [(8_000, True, 51_368), pytest.param(16_000, False, 75_791, marks=full_alone())]
)
def test_lru_through_the_control_plane_hits_exactly_what_lru_hits(requests, rows, loads, expected):
    """0.17805199 and 0.26270710 of the references; loading the hits ages them as touching them does."""
    assert hits(requests, "lru", rows, loads) == expected


@pytest.mark.parametrize(
    ("rows", "loads", "expected"),
    [pytest.param(8_000, False, 0.191, marks=full_alone()), pytest.param(16_000, True, 0.271, marks=pytest.mark.long)],
)
def test_arc_through_the_control_plane_hits_what_arc_hits(requests, rows, loads, expected):
    assert hits(requests, "arc", rows, loads) / REFERENCES == pytest.approx(expected, abs=0.005)

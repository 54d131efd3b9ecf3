"""Every benchmark that has a toy size runs, compares its data and leaves a record: none of them rots."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import pytest
from support_counts import count, full_alone, fully
from support_paths import PROJECT
from support_servers import needs_server

from benchmarks.loaded import POLICIES, measure
from benchmarks.stack_process import AIMS, BUSY
from faults.machine import warm
from faults.remote.objects import without_ceph
from faults.remote.pool import without_mooncake
from kvtier_gpu.engines.host_memory import load_compiled

ROOT = PROJECT
SOURCES = {path.stem: path.read_text() for path in sorted((ROOT / "benchmarks").glob("*.py"))}
COMMANDS = [name for name, source in SOURCES.items() if "@click.command" in source]
NAMES = [name for name in COMMANDS if any(option in SOURCES[name] for option in ("\n@QUICK\n", '"--quick"'))]
OTHERS = [name for name in COMMANDS if name not in NAMES]
NEEDS = {
    "remote_objects": (without_ceph, "Ceph", (pytest.mark.remote,)),
    "remote_pool": (without_mooncake, "Mooncake", (pytest.mark.remote, pytest.mark.mooncake)),
}
"""Benchmarks that need a server that pip does not bring: what says why it is absent, its name, its marks."""
QUICK = ("fs", "lookup", "path")
"""Benchmarks that run in a quick run too."""
BENCHMARKS = [
    pytest.param(name, marks=(pytest.mark.full, *(NEEDS[name][2] if name in NEEDS else ())))
    for name in NAMES
    if name in QUICK or count(1, 0)
]
Record = dict[str, Any]
CALLS_MAX = {
    "store to disk": 367,
    "load from a row": 153,
    "load from disk": 372,
    "lookup in a row": 15,
    "lookup on disk": 19,
    "store, stack process": 345,
    "store, engine's thread": 128 + 26,
}
"""Calls of a trip of one block, where copies are compiled: 1.15 of what is measured, so that a helper has room; in an
engine's thread, which may step once more, those of a step too."""
CALLS_OF_PYTHON_COPY = 14
"""Calls in addition where they are not."""
REUSE_CALLS_MAX = 1.3
"""Calls of a request with `policy: reuse`, of those with `lru`."""
FILES_MAX = 55
"""Source files that a store of one block passes through."""

LINES_MAX = 25_000
"""Lines of kvtier that a serving stack loads."""


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Record]:
    """What a benchmark records at its toy size; each runs once."""
    records: dict[str, Record] = {}

    def run(name: str) -> Record:
        if name not in records:
            file = tmp_path_factory.mktemp(name) / "record.json"
            command = [sys.executable, "-m", f"benchmarks.{name}", "--quick", "--json", str(file)]
            done = warm.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
            assert done.returncode == 0, done.stdout + done.stderr
            records[name] = json.loads(file.read_text())
        return records[name]

    return run


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_benchmark_runs_at_a_toy_size_and_leaves_a_record(name: str, record: Callable[[str], Record]) -> None:
    if name in NEEDS:
        missing, server, _ = NEEDS[name]
        if why := missing():
            needs_server(server, why)
    found = record(name)
    assert found["benchmark"] == name
    assert found["verified"] is True
    assert found["results"]
    assert {"date", "machine", "versions", "settings", "busy"} <= found.keys()


@pytest.mark.parametrize("name", OTHERS)
def test_a_benchmark_without_a_toy_size_says_how_it_is_used(name: str) -> None:
    command = [sys.executable, "-m", f"benchmarks.{name}", "--help"]
    done = warm.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "--quick" not in done.stdout, "it has a toy size, which is to be run"
    assert f"python -m benchmarks.{name}" in SOURCES[name]


def test_the_fs_benchmark_measures_every_pass_and_names_who_is_absent(record: Callable[[str], Record]) -> None:
    found = record("fs")
    ours = [result for result in found["results"] if result["contestant"] == "kvtier"]
    assert {result["pass"].split(",")[0] for result in ours} >= {"first write", "load", "overwrite"}
    assert all(result["gib_per_second"] > 0 and result["cpu_seconds_per_gib"] > 0 for result in ours)
    assert {"vllm: absent", "lmcache-fs: absent", "lmcache-disk: absent"} <= set(found["notes"])


def test_the_path_benchmark_counts_every_trip_of_a_block_and_of_a_batch(record: Callable[[str], Record]) -> None:
    one, batch = ({row["what"]: row for row in record("path")["results"] if row["blocks"] == count} for count in (1, 8))
    assert one.keys() == batch.keys()
    trips = {"store to disk", "load from disk", "load from a row", "lookup in a row", "lookup on disk"}
    sides = {"store, stack process", "store, engine's thread"}
    assert set(one) == trips | sides | {"a request, lru", "a request, reuse"}
    for name, row in one.items():
        assert 0 < row["files_min"] <= row["calls_min"] <= row["calls"] <= row["calls_max"]
        assert batch[name]["calls"] < 8 * row["calls"]
        if name == "store, stack process":
            continue  # whether its own threads hand over depends on the I/O engine
        alone = (
            *("lookup in a row", "lookup on disk", "store, engine's thread"),
            "load from a row" * bool(load_compiled()),
        )
        by_itself = name in alone
        assert (row["hand_overs_max"] == 0) == by_itself
    assert one["load from disk"]["calls"] > one["load from a row"]["calls"]
    for rows in (one, batch):
        assert rows["a request, reuse"]["calls_min"] <= REUSE_CALLS_MAX * rows["a request, lru"]["calls_min"]


@pytest.mark.parametrize("trip", CALLS_MAX)
def test_the_way_of_a_block_does_not_become_longer(trip: str, record: Callable[[str], Record]) -> None:
    """What adds calls to it saves as many elsewhere. Up to six more are counted where time passes between two steps."""
    (row,) = (row for row in record("path")["results"] if (row["blocks"], row["what"]) == (1, trip))
    copies = 0 if "lookup" in trip or "engine's" in trip or load_compiled() else CALLS_OF_PYTHON_COPY
    assert row["calls_min"] <= CALLS_MAX[trip] + copies
    assert row["files_min"] <= FILES_MAX


@fully
def test_the_stack_process_benchmark_has_every_figure(record: Callable[[str], Record]) -> None:
    rows = {row["what"]: row for row in record("stack_process")["results"]}
    absent = {f"1024 KiB one by one, {BUSY}, share of the disk tier"}  # at the toy size
    assert rows.keys() >= AIMS.keys() - absent
    assert all(rows[name]["process"] > 0 for name in AIMS.keys() - absent)


@pytest.mark.parametrize(
    "policy", [pytest.param(name, marks=() if name == "reuse" else full_alone()) for name in POLICIES]
)
def test_a_serving_stack_loads_no_more_code(policy: str) -> None:
    """Neither tools, engines and the doubles of tests, nor other tiers than the stack has."""
    found = measure(policy)
    print(f"{policy}: {len(found)} modules, {sum(found.values())} lines")
    assert sum(found.values()) <= LINES_MAX
    rooms = {".".join(name.split(".")[:2]) for name in found}
    assert not rooms & {
        "kvtier.tools",
        "kvtier.engines",
        "kvtier.testing",
        "kvtier.traces",
        "kvtier.cli",
        "kvtier_remote",
    }

"""Times of a trace: their span is printed, an unlikely one is doubted, `--time-unit` reads them as they are."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
from support_tools import tool

from kvtier.errors import ConfigError
from kvtier.tools.whatif.service import read_calibration
from kvtier.traces.read import read_lines, read_trace

PER_SECOND = {"s": 1, "ms": 1000, "us": 1_000_000}
BOM = b"\xef\xbb\xbf"
STACK = """
tiers: [{type: gpu}, {type: cpu, cpu_bytes_to_use: 1MiB}, {type: fs, roots: [/none], capacity: 4MiB, direct: off}]
"""


def requests(per_second: int, seconds_between: float = 2.0, count: int = 40) -> list[dict[str, Any]]:
    """Conversations of a few turns, as the Bailian traces have them, their times in a unit."""
    rng, now, ids, lines = Random(7), 0.0, [0], []
    for number in range(count):
        now += rng.expovariate(1 / seconds_between)
        ids = [*ids, number] if rng.random() < 0.6 else [1000 + number]
        lengths = {"input_length": 16 * len(ids), "output_length": 5}
        lines.append({"timestamp": now * per_second, **lengths, "hash_ids": ids})
    return lines


def write(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def stack(tmp_path: Path) -> Path:
    path = tmp_path / "stack.yaml"
    path.write_text(STACK)
    return path


def command(name: str, stack: Path, trace: Path) -> list[str | Path]:
    """A command over a trace, which is its last argument."""
    few = ("--cpu-blocks", "64", "--fs-blocks", "64", "--block-bytes", "4096", "--backlog", "100")
    return {
        "advise": ["advise", "--trace", trace],
        "record": ["record", trace],
        "replay": ["replay", *few, "--trace", trace],
        "simulate": ["simulate", stack, "--block-bytes", "4096", "--arrivals", "trace", "--trace", trace],
    }[name]


READERS = ("advise", "record", "replay", "simulate")


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize(("written", "read"), [("s", None), ("ms", "s"), ("ms", "us")])
def test_every_reader_prints_the_span_and_doubts_a_wrong_unit(name, written, read, stack: Path, tmp_path: Path):
    per_second = PER_SECOND[written]
    trace = write(tmp_path / "t.jsonl", requests(per_second))
    given = command(name, stack, trace)
    wrong = tool(*given, *(["--time-unit", read] if read else []))
    span, doubt = wrong.stderr.splitlines()
    assert span.startswith("note: t.jsonl: 40 requests over ")
    assert doubt.startswith("warning: t.jsonl: ")
    assert "--time-unit" in doubt
    right = tool(*given, "--time-unit", written)
    (span,) = right.stderr.splitlines()
    times = [json.loads(line)["timestamp"] for line in trace.read_text().splitlines()]
    lasts = (times[-1] - times[0]) / per_second
    assert 60 < lasts < 120
    assert span == f"note: t.jsonl: 40 requests over {lasts:.3g} s"
    assert (wrong.exit_code, right.exit_code) == (0, 0)


@pytest.mark.parametrize("name", READERS)
def test_the_figures_are_those_of_the_same_trace_in_milliseconds(name, stack: Path, tmp_path: Path):
    found = []
    for unit in ("ms", "s"):
        trace = write(tmp_path / "t.jsonl", requests(PER_SECOND[unit]))
        out = tmp_path / f"{unit}.json"
        result = tool(*command(name, stack, trace), "--time-unit", unit, "--json", out)
        assert result.exit_code == 0, result.output
        found.append(json.loads(out.read_text()))
    seconds = [figures.get("settings", {}).get("source_seconds", figures.get("seconds")) for figures in found]
    assert seconds[0] == pytest.approx(seconds[1])
    assert 60 < seconds[0] < 120
    if name == "simulate":
        waits = [figures["variants"][0]["virtual_seconds"] for figures in found]
        assert waits[0] == pytest.approx(waits[1])
        assert waits[0] > 60


def test_a_likely_trace_and_a_short_one_are_not_doubted(stack: Path, tmp_path: Path):
    for between in (0.05, 2.0, 30.0):
        result = tool("record", write(tmp_path / "t.jsonl", requests(1000, between)))
        assert "warning" not in result.stderr, between
    assert "warning" not in tool("record", write(tmp_path / "t.jsonl", requests(1)[:5])).stderr
    untimed = [{name: value for name, value in line.items() if name != "timestamp"} for line in requests(1)]
    assert tool("record", write(tmp_path / "t.jsonl", untimed)).stderr == ""


def test_the_unit_counts_for_both_fields_of_a_line(tmp_path: Path):
    line = {"input_length": 64, "output_length": 0, "rle": [[1, 1]]}
    (found,) = read_lines(write(tmp_path / "t.jsonl", [{**line, "t": 3000}]))
    assert [found.seconds(), found.seconds("ms"), found.seconds("us")] == [3000, 3.0, 0.003]
    (found,) = read_lines(write(tmp_path / "t.jsonl", [{**line, "timestamp": 3000}]))
    assert [found.seconds(), found.seconds("s")] == [3.0, 3000.0]


def test_a_workload_has_no_unit():
    result = tool("replay", "--time-unit", "s")
    assert (result.exit_code, result.stderr) == (2, "error: --time-unit: goes with --trace only\n")


@pytest.mark.parametrize("timestamp", [1e300, -1e300])
def test_a_time_beyond_all_clocks_is_refused(timestamp: float, tmp_path: Path):
    """Two of them would be an infinite span."""
    trace = write(tmp_path / "t.jsonl", [requests(1)[0] | {"timestamp": timestamp}])
    with pytest.raises(ConfigError, match=r"t\.jsonl:1: timestamp"):
        read_trace(trace)


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzip"])
def test_a_byte_order_mark_is_no_part_of_the_first_line(pack: Any, tmp_path: Path):
    plain = "".join(json.dumps(line) + "\n" for line in requests(1000)).encode()
    (tmp_path / "t.jsonl").write_bytes(pack(plain))
    (tmp_path / "marked.jsonl").write_bytes(pack(BOM + plain))
    assert list(read_lines(tmp_path / "marked.jsonl")) == list(read_lines(tmp_path / "t.jsonl"))
    (tmp_path / "twice.jsonl").write_bytes(pack(plain + BOM + plain))
    with pytest.raises(ConfigError, match=r"twice\.jsonl:41: not a JSON object"):
        list(read_lines(tmp_path / "twice.jsonl"))


def test_a_byte_order_mark_is_accepted_in_every_file_that_is_read(stack: Path, tmp_path: Path):
    stack.write_bytes(BOM + stack.read_bytes())
    small = ("--no-probe", "--layout", "full:page=4KiB,block=16")
    assert tool("check", stack, *small).exit_code == 0
    measured = {"command": "bench", "version": 1, "tiers": []}
    (tmp_path / "bench.json").write_bytes(BOM + json.dumps(measured).encode())
    assert read_calibration(tmp_path / "bench.json") == read_calibration(None)

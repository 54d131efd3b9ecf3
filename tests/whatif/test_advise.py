"""The curve of LRU is that of simulated tiers, at every size; advice spends money where it saves most."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from click.testing import CliRunner
from support_counts import seeds
from support_paths import TRACES

from kvtier.cli import main
from kvtier.config.layout import DEFAULT_LAYOUT, read_layout
from kvtier.errors import ConfigError
from kvtier.policy.reuse.policy import Reuse
from kvtier.tools.commands.record import summarize
from kvtier.tools.whatif.advise import GIB, Costs, Prices, Savings, Sizes, block_bytes_of, read_prices
from kvtier.tools.whatif.miss_ratio import Curve, StackDistances, lru_curve, shadow_rates
from kvtier.traces.read import read_trace
from kvtier.traces.requests import RequestSource
from kvtier.types.keys import RequestId
from kvtier.types.requests import RequestUse

TRACE = TRACES / "conversation.jsonl"
BLOCK_TOKENS = 16


def write_trace(path: Path, seed: int, requests: int = 300) -> RequestSource:
    """Conversations that grow, branch, are cut, and share their beginnings; some ids are local to a session."""
    rng = random.Random(seed)
    known = [[0, 1, 2]]
    with path.open("w") as stream:
        for number in range(requests):
            ids = list(rng.choice(known[-30:]))
            ids = ids[: rng.randint(0, len(ids))] + [1000 * number + block for block in range(rng.randint(0, 9))]
            ids = ids or [5]
            known.append(ids)
            tokens = len(ids) * BLOCK_TOKENS - rng.choice((0, 0, 1, 7))
            session = {"session": "a"} if rng.random() < 0.2 else {}
            line = {"input_length": tokens, "output_length": 3, "hash_ids": ids} | session
            stream.write(json.dumps(line) + "\n")
    return read_trace(path, block_tokens=BLOCK_TOKENS)


@pytest.mark.parametrize("seed", seeds(6, 2))
def test_the_curve_is_that_of_a_tier_of_every_size(seed: int, tmp_path: Path) -> None:
    source = write_trace(tmp_path / "trace.jsonl", seed)
    curve = lru_curve(source)
    sizes = [*range(1, 60, 2), *range(60, curve.working_set + 20, 97)]
    print(f"seed {seed}, working set {curve.working_set}")
    assert shadow_rates(source, "lru", sizes) == [curve.hit_rate(size) for size in sizes]


@pytest.mark.parametrize("seed", seeds(6, 2))
def test_a_summary_finds_again_what_a_tier_without_bound_hits(seed: int, tmp_path: Path) -> None:
    source = write_trace(tmp_path / "trace.jsonl", seed)
    curve, found = lru_curve(source), summarize(source)
    assert any(request.prompt_tokens % BLOCK_TOKENS for request in source.requests())
    assert (found.reused_blocks, found.distinct_blocks) == (curve.hits(curve.working_set), curve.working_set)
    assert found.reuse == curve.hit_rate(curve.working_set)


def test_places_of_recency_are_given_out_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.tools.whatif.miss_ratio.PLACES_LEAST", 2)
    source = write_trace(tmp_path / "trace.jsonl", 11)
    curve = lru_curve(source)
    sizes = [3, 17, 80, 200]
    assert shadow_rates(source, "lru", sizes) == [curve.hit_rate(size) for size in sizes]


class Noting(Reuse):
    """Notes which requests begin and end, in this order."""

    calls: ClassVar[list[str]] = []

    def begin_request(self, use: RequestUse, slots: Sequence[int]) -> None:
        self.calls.append(f"begin {use.request_id}")
        super().begin_request(use, slots)

    def end_request(self, request_id: RequestId, output_tokens: int | None) -> None:
        self.calls.append(f"end {request_id} {output_tokens}")
        super().end_request(request_id, output_tokens)


@pytest.mark.parametrize(
    ("times", "calls"),
    [
        ((0.0, 5.0, 12.0), ["begin 0", "begin 1", "end 0 500", "begin 2"]),
        ((None, None, None), ["begin 0", "end 0 500", "begin 1", "end 1 500", "begin 2"]),
    ],
)
def test_a_policy_knows_an_output_once_it_is_generated(
    times: tuple[float | None, ...], calls: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Noting, "calls", [])
    line = {"input_length": 16, "output_length": 500, "hash_ids": [1]}
    lines = [json.dumps(line | ({} if time is None else {"t": time})) for time in times]
    (tmp_path / "trace.jsonl").write_text("\n".join(lines))
    shadow_rates(read_trace(tmp_path / "trace.jsonl", block_tokens=BLOCK_TOKENS), Noting, [4])
    assert Noting.calls == calls


@pytest.mark.trace
@pytest.mark.skipif(not TRACE.is_file(), reason="no trace: put conversation.jsonl into ../shared/traces")
def test_the_curve_of_a_trace_is_that_of_twenty_sizes(dial: Callable[[int, int], int]) -> None:
    source = read_trace(TRACE, dial(1200, 600))
    curve = lru_curve(source)
    sizes = np.geomspace(100, curve.working_set, 20).astype(int).tolist()
    assert shadow_rates(source, "lru", sizes) == [curve.hit_rate(size) for size in sizes]


def test_a_curve_of_nothing_is_empty() -> None:
    curve = StackDistances(BLOCK_TOKENS).curve()
    assert (curve.working_set, curve.hits(100), curve.hit_rate(100), curve.knee()) == (0, 0, 0.0, 0)


def worth(disk_seconds: float = 0.5) -> Savings:
    """A GiB a block; the first 10 blocks hit 5 each, the next 90 one each."""
    cumulative = np.concatenate([[0], np.full(10, 5), np.full(90, 1)]).cumsum()
    return Savings(Curve(1000, 100, 16000, 16, cumulative), Costs(1.0, 0.25, disk_seconds, GIB))


def test_a_hit_saves_its_prefill_less_its_load() -> None:
    assert worth().seconds_saved(Sizes(10 * GIB)) == 50 * 0.75
    assert worth().seconds_saved(Sizes(10 * GIB, 20 * GIB)) == 50 * 0.75 + 10 * 0.5
    assert worth().seconds_saved(Sizes(10 * GIB, 5 * GIB)) == 50 * 0.75
    assert worth(disk_seconds=2.0).seconds_saved(Sizes(0, 100 * GIB)) == 0.0
    assert worth().per_gib(Sizes(), 2 * GIB) == (5 * 0.75, 5 * 0.5)
    assert worth().curve.knee() == 10


def test_money_goes_where_it_saves_most() -> None:
    dear, cheap = Prices(cpu_gib=10.0, disk_gib=10.0), Prices(cpu_gib=10.0, disk_gib=1.0)
    first = worth().purchases(Sizes(), dear, 100, 2)
    assert (first[0].cpu_bytes, first[0].disk_bytes) == (10 * GIB, 0)
    assert first[0].seconds_gained == 50 * 0.75
    assert first[1].sizes.cpu_bytes == 20 * GIB
    mixed = worth().purchases(Sizes(), cheap, 100, 1)[0]
    assert mixed.disk_bytes > 0
    others = [worth().seconds_saved(cheap.buy(Sizes(), 100, share / 10)) for share in range(11)]
    assert mixed.seconds_saved >= max(others)


def test_prices_come_from_a_file_or_from_options(tmp_path: Path) -> None:
    path = tmp_path / "prices.yaml"
    path.write_text("cpu_gib: 4.5\ndisk_gib: 0.1\n")
    assert read_prices(path, None, None) == Prices(cpu_gib=4.5, disk_gib=0.1) == read_prices(None, 4.5, 0.1)
    assert read_prices(None, None, None) is None
    with pytest.raises(ConfigError, match="of both"):
        read_prices(None, 4.5, None)
    path.write_text("cpu_gib: 0\n")
    with pytest.raises(ConfigError, match="cpu_gib"):
        read_prices(path, None, None)


def test_a_block_has_the_bytes_of_its_tokens() -> None:
    assert block_bytes_of(read_layout(DEFAULT_LAYOUT).layout(), 512) == 2 * 32 * 8 * 128 * 2 * 512


def test_the_command_advises(tmp_path: Path) -> None:
    source, figures = write_trace(tmp_path / "trace.jsonl", 3), tmp_path / "figures.json"
    command = ["advise", "--trace", str(tmp_path / "trace.jsonl"), "--block-tokens", str(BLOCK_TOKENS)]
    prices = ["--price-cpu", "4", "--price-disk", "0.1", "--budget", "0.01"]
    done = CliRunner().invoke(
        main, [*command, *prices, "--policy", "arc", "--policy", "reuse", "--cpu", "64MiB", "--json", str(figures)]
    )
    assert done.exit_code == 0, done.output
    found = json.loads(figures.read_text())
    curve = lru_curve(source)
    assert found["lru"][-1]["hit_rate"] == curve.hit_rate(curve.working_set)
    for policy in ("arc", "reuse"):
        shadow = found["shadows"][policy]
        assert [point["blocks"] for point in shadow] == [16, 32, 64, 128]
        slope = found["lru"][-1]["hit_rate"] / found["working_set_blocks"]
        above = {point["blocks"]: point["hit_rate"] - slope * point["blocks"] for point in shadow}
        assert above[found["shadow_knees"][policy]] == max(above.values())
        assert f"Of these its knee is {found['shadow_knees'][policy]} blocks" in done.output
    assert "The next 0.01 go to" in done.output
    assert found["purchases"][0]["seconds_gained"] > 0
    wrong = CliRunner().invoke(main, [*command, "--price-cpu", "4"])
    assert (wrong.exit_code, wrong.output.count("\n")) == (2, 1)


def test_a_calibration_counts_by_medium_whatever_its_tiers_are_called(tmp_path: Path) -> None:
    def advice(*tiers: tuple[str, str, float], status: int = 0) -> tuple[dict[str, Any], str]:
        measured = [
            {
                "name": name,
                "medium": medium,
                "figures": [
                    {"move": move, "block_bytes": 65536, "gib_per_second": rate, "single_p50_us": 0.0}
                    for move in ("load", "store")
                ],
            }
            for name, medium, rate in tiers
        ]
        calibration, figures = tmp_path / "bench.json", tmp_path / "figures.json"
        calibration.write_text(json.dumps({"command": "bench", "tiers": measured}))
        done = CliRunner().invoke(main, [*command, "--calibration", str(calibration), "--json", str(figures)])
        assert done.exit_code == status, done.output
        return json.loads(figures.read_text()), " ".join(done.output.split())

    write_trace(tmp_path / "trace.jsonl", 3, 50)
    command = ["advise", "--trace", str(tmp_path / "trace.jsonl"), "--block-tokens", str(BLOCK_TOKENS)]
    found, shown = advice(("dram", "CPU", 2.0), ("nvme", "FS", 0.5))
    costs = found["costs"]
    assert costs["cpu_seconds"] == pytest.approx(costs["block_bytes"] / (2.0 * GIB))
    assert costs["disk_seconds"] == pytest.approx(costs["block_bytes"] * (1 / 2.0 + 1 / 0.5) / GIB)
    assert "cpu measured: load 2.00 GiB/s" in shown
    assert "disk measured: load 0.50 GiB/s" in shown
    found, shown = advice(("dram", "CPU", 2.0))
    assert (found["services"]["cpu"]["source"], found["services"]["disk"]["source"]) == ("measured", "assumed")
    assert "disk assumed: load 2.00 GiB/s" in shown
    _, shown = advice(("cpu", "FS", 2.0), status=2)
    assert "bench.json: has no figures of a CPU tier" in shown

"""A simulation hits what a replay hits, block for block, and says where a stack is short."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from support_paths import TRACES

from kvtier.cli import main
from kvtier.errors import ConfigError
from kvtier.replay.run import Replay
from kvtier.replay.serve import Server
from kvtier.replay.setup import ReplayOptions
from kvtier.types.jobs import JobKind
from kvtier.types.keys import FS
from kvtier.whatif.report import shortages
from kvtier.whatif.service import ASSUMED, read_calibration
from kvtier.whatif.simulate import Simulated, SimulateOptions, Simulation
from kvtier.whatif.variants import grid

TRACE = TRACES / "conversation.jsonl"
BLOCK_BYTES = 4096
STACKS = {
    "cpu": "{{type: cpu, cpu_bytes_to_use: 2MiB}}",
    "arc": "{{type: cpu, cpu_bytes_to_use: 1600KiB, policy: arc}}, "
    "{{type: fs, roots: [{0}/a], capacity: 8MiB, policy: arc}}",
    "two": "{{type: cpu, cpu_bytes_to_use: 1600KiB}}, {{type: fs, name: near, roots: [{0}/a], capacity: 6MiB}}, "
    "{{type: fs, name: far, roots: [{0}/b], capacity: 12MiB, policy: arc}}",
    "second_use": "{{type: cpu, cpu_bytes_to_use: 1600KiB}}, "
    "{{type: fs, roots: [{0}/a], capacity: 8MiB, admit: second_use}}",
    "roots": "{{type: cpu, cpu_bytes_to_use: 1600KiB}}, {{type: fs, roots: [{0}/a, {0}/b], capacity: 8MiB}}",
    "reuse": "{{type: cpu, cpu_bytes_to_use: 1600KiB, policy: reuse}}, "
    "{{type: fs, roots: [{0}/a], capacity: 8MiB, policy: reuse}}",
}
"""Without on_evict: there a replay differs from the next one, because what goes down depends on when copies end."""
Where = list[list[list[str | None]]]


def write_stack(folder: Path, name: str) -> Path:
    for root in ("a", "b"):
        (folder / root).mkdir(exist_ok=True)
    path = folder / "stack.yaml"
    path.write_text(f"tiers: [{{type: gpu}}, {STACKS[name].format(folder)}]\n")
    return path


@pytest.fixture
def where(monkeypatch: pytest.MonkeyPatch) -> Iterator[Where]:
    """In which tier each block of each request is when it is looked up."""
    seen: Where = []
    look_up = Server._lookup

    async def recording(self: Server, work: object) -> None:
        await look_up(self, work)  # type: ignore[arg-type]
        seen.append([list(group) for group in work.where])  # type: ignore[attr-defined]

    monkeypatch.setattr(Server, "_lookup", recording)
    return seen


def simulated(options: ReplayOptions, *settings: str) -> list[Simulated]:
    assert options.stack is not None
    return list(Simulation(SimulateOptions(options.stack, options), grid(settings)).run())


def assert_as_replayed(options: ReplayOptions, where: Where) -> Simulated:
    replayed = asyncio.run(Replay(options).run())
    in_replay = list(where)
    where.clear()
    if any(tier.late or tier.dropped.keys() - {"bypassed"} for tier in replayed.tiers.values()):
        pytest.skip("a tier of the replay was late on this busy machine")
    found = simulated(options)[0]
    assert where == in_replay
    for name in ("requests", "prompt_tokens", "hit_tokens", "stored", "loaded", "computed", "block_hits", "dropped"):
        assert getattr(found.counts, name) == getattr(replayed.counts, name), name
    for name, tier in found.tiers.items():
        real = replayed.tiers[name]
        for figure in ("hits", "loaded", "stored", "load_bytes", "store_bytes", "evictions", "skipped"):
            assert getattr(tier, figure) == getattr(real, figure), (name, figure)
    return found


@pytest.mark.parametrize("name", STACKS)
def test_a_workload_hits_what_a_replay_hits(name: str, tmp_path: Path, where: Where) -> None:
    stack = write_stack(tmp_path, name)
    found = assert_as_replayed(
        ReplayOptions(stack=stack, workload="chat", requests=120, block_bytes=BLOCK_BYTES, seed=7), where
    )
    lowest = list(found.tiers)[-1]
    assert found.counts.hit_tokens[lowest], "the workload never reached the lowest tier"


@pytest.mark.trace
@pytest.mark.skipif(not TRACE.is_file(), reason="no trace: put conversation.jsonl into ../shared/traces")
@pytest.mark.parametrize("name", STACKS)
def test_a_trace_hits_what_a_replay_hits(name: str, tmp_path: Path, where: Where) -> None:
    stack = write_stack(tmp_path, name)
    found = assert_as_replayed(ReplayOptions(stack=stack, trace=TRACE, requests=250, block_bytes=BLOCK_BYTES), where)
    assert found.counts.block_hits


@pytest.fixture
def options(tmp_path: Path) -> ReplayOptions:
    return ReplayOptions(stack=write_stack(tmp_path, "two"), workload="chat", requests=60, block_bytes=BLOCK_BYTES)


def test_a_grid_runs_every_combination_and_more_memory_hits_more(options: ReplayOptions) -> None:
    found = simulated(options, "cpu.bytes=400KiB,4MiB", "far.policy=lru,arc")
    assert [variant.changes for variant in found] == [
        {"cpu.bytes": size, "far.policy": policy} for size in ("400KiB", "4MiB") for policy in ("lru", "arc")
    ]
    assert found[2].counts.hit_tokens["cpu"] > found[0].counts.hit_tokens["cpu"]
    assert found[2].first_tokens.saved > found[0].first_tokens.saved


def test_a_simulation_is_deterministic(options: ReplayOptions) -> None:
    first, second = (simulated(options)[0] for _ in range(2))
    assert first.counts == second.counts
    assert first.tiers == second.tiers
    assert first.first_tokens == second.first_tokens


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("cpu.bytes", "is no TIER.OPTION=VALUE"),
        ("disk.bytes=1GiB", "the stack has no tier 'disk'"),
        ("cpu.bytes=much", "is not a size"),
        ("far.blocks=-1", "is no number of blocks"),
        ("far.polcy=arc", "polcy"),
        ("cpu.policy=oldest", "policy"),
        ("cpu.bytes=100", "cpu"),
    ],
)
def test_a_wrong_change_is_one_line(options: ReplayOptions, setting: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        simulated(options, setting)


def test_a_slow_tier_is_late_and_short(options: ReplayOptions, tmp_path: Path) -> None:
    """Measured at a few KiB/s, the disk cannot take what is written to it."""
    measured = [{"move": move, "block_bytes": BLOCK_BYTES, "gib_per_second": 2e-6} for move in ("load", "store")]
    path = tmp_path / "bench.json"
    path.write_text(json.dumps({"command": "bench", "tiers": [{"name": "far", "figures": measured}]}))
    assert options.stack is not None
    found = next(Simulation(SimulateOptions(options.stack, options, path), grid(["far.job_timeout_seconds=2"])).run())
    assert found.services["far"].source == "measured"
    assert found.waits["far"].late
    assert found.tiers["far"].late
    assert "far" not in found.counts.hit_tokens
    assert found.counts.requests == 60


@pytest.mark.parametrize(("disk", "slow"), [(1e-4, True), (1.0, False)])
def test_what_a_slow_tier_would_load_later_is_computed(tmp_path: Path, disk: float, slow: bool) -> None:
    """At 1e-4 GiB/s a block takes 38 ms to load, and 1.6 ms to compute at 10,000 tokens/s."""
    measured = [{"move": move, "block_bytes": BLOCK_BYTES, "gib_per_second": disk} for move in ("load", "store")]
    path = tmp_path / "bench.json"
    path.write_text(json.dumps({"command": "bench", "tiers": [{"name": "fs", "figures": measured}]}))
    stack = write_stack(tmp_path, "arc")
    options = ReplayOptions(stack=stack, workload="chat", requests=120, block_bytes=BLOCK_BYTES)

    def run() -> Simulated:
        return next(Simulation(SimulateOptions(stack, options, path, 10_000.0), grid([])).run())

    waiting = run()
    stack.write_text("prefill_tokens_per_second: 10000\n" + stack.read_text())
    choosing = run()
    assert waiting.counts.hit_tokens["fs"]
    assert bool(choosing.tiers["fs"].computed_sooner) == slow
    if slow:
        assert choosing.first_tokens.saved > waiting.first_tokens.saved
        assert choosing.counts.hit_tokens["fs"] < waiting.counts.hit_tokens["fs"]
    else:
        assert choosing.counts == waiting.counts


def test_a_calibration_takes_the_figure_of_the_nearest_size(tmp_path: Path) -> None:
    sizes = {4096: 1.0, 1 << 20: 4.0}
    figures = [
        {
            "move": move,
            "block_bytes": size,
            "gib_per_second": rate,
            "single_p50_us": 100.0 + size / rate / (1 << 30) * 1e6,
        }
        for size, rate in sizes.items()
        for move in ("load", "store")
    ]
    path = tmp_path / "bench.json"
    path.write_text(json.dumps({"command": "bench", "tiers": [{"name": "fs", "figures": figures}]}))
    service = read_calibration(path).service("fs", FS, 700_000)
    assert service.of(JobKind.LOAD).bytes_per_second == 4 << 30
    assert service.of(JobKind.STORE).latency_seconds == pytest.approx(100e-6)
    assert read_calibration(path).service("other", FS, 700_000) == ASSUMED[FS]
    path.write_text("{}")
    with pytest.raises(ConfigError, match="holds no figures"):
        read_calibration(path)


def write_times(path: Path, times: list[float]) -> Path:
    """A request of 160 tokens, all its own, at each time."""
    lines = [
        {"t": at, "input_length": 160, "output_length": 1, "hash_ids": [*range(10 * n, 10 * n + 10)]}
        for n, at in enumerate(times)
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def arriving(options: ReplayOptions, trace: Path, *settings: str, calibration: Path | None = None) -> Simulated:
    replay = replace(options, trace=trace, workload=None, requests=None, concurrency=4)
    assert options.stack is not None
    chosen = SimulateOptions(options.stack, replay, calibration, 160.0, "trace")
    return next(Simulation(chosen, grid(settings)).run())


def test_prompts_that_come_together_wait_for_each_other(options: ReplayOptions, tmp_path: Path) -> None:
    """A second of prefill each: two at once, one later, whose time goes back and counts as the last one."""
    found = arriving(options, write_times(tmp_path / "t.jsonl", [5.0, 5.0, 105.0, 99.0]))
    times = found.first_tokens
    assert times.computing == [1.0, 2.0, 1.0, 2.0]
    assert times.seconds == pytest.approx([1.0, 2.0, 1.0, 2.0], abs=0.01)
    assert found.counts.requests == 4


def test_a_burst_is_more_than_a_slow_disk_takes(options: ReplayOptions, tmp_path: Path) -> None:
    measured = [{"move": move, "block_bytes": BLOCK_BYTES, "gib_per_second": 1e-5} for move in ("load", "store")]
    path = tmp_path / "bench.json"
    path.write_text(json.dumps({"command": "bench", "tiers": [{"name": "near", "figures": measured}]}))
    slow = ("near.inflight_bytes=64KiB", "near.job_timeout_seconds=600")
    burst = arriving(options, write_times(tmp_path / "t.jsonl", [0.0] * 400), *slow, calibration=path)
    spread = write_times(tmp_path / "t.jsonl", [100.0 * number for number in range(20)])
    calm = arriving(options, spread, *slow, calibration=path)
    assert burst.tiers["near"].dropped
    assert any("near" in line for line in shortages(burst))
    assert not calm.tiers["near"].dropped


def test_a_trace_without_times_has_no_arrivals(options: ReplayOptions, tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    trace.write_text(json.dumps({"input_length": 64, "output_length": 1, "hash_ids": [1, 2, 3, 4]}))
    with pytest.raises(ConfigError, match="no times"):
        arriving(options, trace)


def test_the_command_prints_and_writes_what_it_found(options: ReplayOptions, tmp_path: Path) -> None:
    trace, figures = tmp_path / "t.jsonl", tmp_path / "figures.json"
    lines = [{"input_length": 64, "output_length": 1, "hash_ids": [n % 9, 100 + n % 9, 200, 300]} for n in range(40)]
    trace.write_text("\n".join(map(json.dumps, lines)))
    command = ["simulate", str(options.stack), "--trace", str(trace), "--block-bytes", "4KiB", "--json", str(figures)]
    done = CliRunner().invoke(main, [*command, "--set", "cpu.blocks=8,32"])
    assert done.exit_code == 0, done.output
    found = json.loads(figures.read_text())
    assert [variant["changes"] for variant in found["variants"]] == [{"cpu.blocks": "8"}, {"cpu.blocks": "32"}]
    assert "cpu.blocks=32" in done.output
    wrong = CliRunner().invoke(main, [*command, "--set", "gpu.bytes=1GiB"])
    assert wrong.exit_code == 2
    assert wrong.output.startswith("error: ")

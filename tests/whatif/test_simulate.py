"""A simulation hits what a replay hits, block for block, and says where a stack is short."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from click.testing import CliRunner
from support_counts import full_alone
from support_paths import TRACES

from kvtier.cli import main
from kvtier.errors import ConfigError
from kvtier.tools.replay.run import Replay
from kvtier.tools.replay.serve import ReplayLoop
from kvtier.tools.replay.setup import ReplayOptions, make_source
from kvtier.tools.whatif.miss_ratio import shadow_rates
from kvtier.tools.whatif.report import shortages
from kvtier.tools.whatif.service import ASSUMED, read_calibration
from kvtier.tools.whatif.simulate import Simulated, SimulateOptions, Simulation
from kvtier.tools.whatif.variants import grid
from kvtier.types.jobs import JobKind
from kvtier.types.keys import FS

TRACE = TRACES / "conversation.jsonl"
BLOCK_BYTES = 4096
UNHURRIED_SECONDS = 600
"""Deadlines of the stacks: nothing is late, whatever else this machine does."""
Tier = dict[str, object]
Where = list[list[list[str | None]]]


def cpu(**more: object) -> Tier:
    return {"type": "cpu", "cpu_bytes_to_use": "1600KiB"} | more


def fs(*roots: str, **more: object) -> Tier:
    fixed = {"type": "fs", "roots": roots or ("a",), "capacity": "8MiB", "job_timeout_seconds": UNHURRIED_SECONDS}
    return fixed | more


FEW_ROWS: Tier = {"cpu_bytes_to_use": "400KiB"}
FEW_SLOTS: Tier = {"capacity": "1MiB"}
STACKS: dict[str, list[Tier]] = {
    "cpu": [cpu(cpu_bytes_to_use="2MiB")],
    "arc": [cpu(policy="arc"), fs(policy="arc")],
    "two": [cpu(), fs("a", name="near", capacity="6MiB"), fs("b", name="far", capacity="12MiB", policy="arc")],
    "second_use": [cpu(), fs(admit="second_use")],
    "roots": [cpu(), fs("a", "b")],
}
"""Without on_evict: there a replay differs from the next one, because what goes down depends on when copies end."""
FOLLOWING: dict[str, list[Tier]] = {
    "reuse": [cpu(policy="reuse") | FEW_ROWS, fs(policy="reuse") | FEW_SLOTS],
    "reuse above": [cpu(policy="reuse") | FEW_ROWS, fs() | FEW_SLOTS],
    "reuse below": [cpu() | FEW_ROWS, fs(policy="reuse") | FEW_SLOTS],
    "predicted": [cpu() | FEW_ROWS, fs(admit="predicted") | FEW_SLOTS],
    "reuse predicted": [cpu(policy="reuse") | FEW_ROWS, fs(policy="reuse", admit="predicted") | FEW_SLOTS],
}
"""Stacks that follow requests: what they place depends on the times of these, and on what is on its way meanwhile. No
prompt of `write_conversations` is longer than a quarter of the rows, which may be on its way at once."""


FOLLOWED = [
    pytest.param(name, marks=() if name in ("reuse", "reuse predicted") else full_alone()) for name in FOLLOWING
]
"""A quick run has those that do both above and below the CPU tier."""

NOT_WRITTEN = {
    "reuse": "bypassed",
    "reuse below": "bypassed",
    "predicted": "not_admitted",
    "reuse predicted": "not_admitted",
}
"""Why a part of the blocks does not go to the disk of such a stack."""


def write_stack(folder: Path, name: str, **top: object) -> Path:
    tiers: list[Tier] = [{"type": "gpu"}]
    for tier in (STACKS | FOLLOWING)[name]:
        roots = [folder / str(root) for root in tier.get("roots", ())]  # type: ignore[attr-defined]
        for root in roots:
            root.mkdir(exist_ok=True)
        tiers.append(tier | ({"roots": list(map(str, roots))} if roots else {}))
    seconds = {"load_timeout_seconds": UNHURRIED_SECONDS, "store_timeout_seconds": UNHURRIED_SECONDS}
    path = folder / "stack.yaml"
    path.write_text(json.dumps(seconds | top | {"tiers": tiers}))
    return path


def write_conversations(path: Path, seed: int, requests: int) -> Path:
    """Chats that grow by two blocks a turn, among longer prompts that never come back."""
    rng, now, chats = Random(seed), 0.0, [[chat << 20] for chat in range(24)]
    with path.open("w") as stream:
        for number in range(requests):
            now += rng.expovariate(1 / 10)
            turn, once = rng.randrange(len(chats)), rng.random() < 0.4
            if once or len(chats[turn]) > 14:
                ids = [number << 40 | block for block in range(12 if once else 2)]
            else:
                ids = [*chats[turn], *(number << 40 | block for block in range(2))]
            if not once:
                chats[turn] = ids
            line = {"t": now, "input_length": 16 * len(ids), "output_length": 100 if once else 8, "hash_ids": ids}
            stream.write(json.dumps(line) + "\n")
    return path


@pytest.fixture
def where(monkeypatch: pytest.MonkeyPatch) -> Iterator[Where]:
    """In which tier each block of each request is when it is looked up."""
    seen: Where = []
    look_up = ReplayLoop._lookup

    async def recording(self: ReplayLoop, work: object) -> None:
        await look_up(self, work)  # type: ignore[arg-type]
        seen.append([list(group) for group in work.where])  # type: ignore[attr-defined]

    monkeypatch.setattr(ReplayLoop, "_lookup", recording)
    return seen


def write_calibration(folder: Path, gib_per_second: dict[str, float], latency_us: float = 0.0) -> Path:
    """What `kvtier bench --json` wrote of some tiers. `latency_us` is what a block takes beside its bytes."""
    tiers = []
    for name, rate in gib_per_second.items():
        alone = BLOCK_BYTES / rate / (1 << 30) * 1e6 + latency_us
        figure = {"block_bytes": BLOCK_BYTES, "gib_per_second": rate, "single_p50_us": alone}
        tiers.append({"name": name, "figures": [figure | {"move": move} for move in ("load", "store")]})
    path = folder / "bench.json"
    path.write_text(json.dumps({"command": "bench", "tiers": tiers}))
    return path


def simulated(options: ReplayOptions, *settings: str) -> list[Simulated]:
    assert options.stack is not None
    return list(Simulation(SimulateOptions(options.stack, options), grid(settings)).run())


def assert_as_replayed(options: ReplayOptions, where: Where) -> Simulated:
    replayed = asyncio.run(Replay(options).run())
    in_replay = list(where)
    where.clear()
    for name, tier in replayed.tiers.items():
        assert (tier.late, tier.failed, tier.dropped.keys() - {"bypassed"}) == (0, 0, set()), name
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
def test_a_workload_hits_what_a_replay_hits(
    name: str, tmp_path: Path, where: Where, dial: Callable[[int, int], int]
) -> None:
    stack, requests = write_stack(tmp_path, name), dial(120, 60)
    found = assert_as_replayed(
        ReplayOptions(stack=stack, workload="chat", requests=requests, block_bytes=BLOCK_BYTES, seed=7), where
    )
    lowest = list(found.tiers)[-1]
    assert found.counts.hit_tokens[lowest], "the workload never reached the lowest tier"


def write_scan(path: Path, prompts: int) -> Path:
    """A prompt that comes twice, longer ones that never come again, and the first one once more."""
    often, now = [1, 2, 3, 4], 0.0
    with path.open("w") as stream:
        for ids in (often, often, *([number << 20 | block for block in range(6)] for number in range(prompts)), often):
            now += 1.0
            line = {"t": now, "input_length": 16 * len(ids) + 1, "output_length": 8, "hash_ids": ids}
            stream.write(json.dumps(line) + "\n")
    return path


def test_to_arc_a_block_that_its_request_has_stored_was_used_once(tmp_path: Path, where: Where) -> None:
    """Else all blocks would be of those used again, in the order of LRU."""
    options = ReplayOptions(
        stack=write_stack(tmp_path, "cpu"),
        trace=write_scan(tmp_path / "trace.jsonl", 8),
        block_tokens=16,
        block_bytes=BLOCK_BYTES,
        gpu_blocks=8,
    )
    simulated(options, "cpu.policy=lru,arc", "cpu.blocks=12")
    lru, arc = where[len(where) // 2 - 1], where[-1]
    assert lru == [[None] * 4]
    assert arc == [["cpu"] * 4]
    assert shadow_rates(make_source(options), "arc", [12]) > shadow_rates(make_source(options), "lru", [12])


@pytest.mark.parametrize("name", FOLLOWED)
def test_what_follows_requests_hits_what_a_replay_hits(
    name: str, tmp_path: Path, where: Where, seed: int, dial: Callable[[int, int], int]
) -> None:
    count = 300 if name in NOT_WRITTEN or name == "reuse above" else dial(300, 150)  # fewer may never hit the disk
    trace = write_conversations(tmp_path / "trace.jsonl", seed, count)
    options = ReplayOptions(
        stack=write_stack(tmp_path, name), trace=trace, block_tokens=16, block_bytes=BLOCK_BYTES, gpu_blocks=20
    )
    disk = assert_as_replayed(options, where).tiers["fs"]
    assert disk.hits
    assert name not in NOT_WRITTEN or disk.skipped[NOT_WRITTEN[name]], "all that there was went to the disk"


@pytest.mark.parametrize("name", FOLLOWED)
def test_hits_do_not_depend_on_how_fast_a_disk_is(
    name: str, seed: int, tmp_path: Path, where: Where, dial: Callable[[int, int], int]
) -> None:
    """Nearly nothing for each job, and a quarter of a second. So those of a replay do not depend on the machine."""
    trace = write_conversations(tmp_path / "trace.jsonl", seed, dial(300, 120))
    stack, seen = write_stack(tmp_path, name), []
    options = ReplayOptions(stack=stack, trace=trace, block_tokens=16, block_bytes=BLOCK_BYTES, gpu_blocks=20)
    for latency_us in (1.0, 250_000.0):
        calibration = write_calibration(tmp_path, {"fs": 1.0}, latency_us)
        next(Simulation(SimulateOptions(stack, options, calibration), grid([])).run())
        seen.append(list(where))
        where.clear()
    assert seen[0] == seen[1]


@pytest.mark.trace
@pytest.mark.skipif(not TRACE.is_file(), reason="no trace: put conversation.jsonl into ../shared/traces")
@pytest.mark.parametrize("name", [*STACKS, *FOLLOWED])
def test_a_trace_hits_what_a_replay_hits(
    name: str, tmp_path: Path, where: Where, dial: Callable[[int, int], int]
) -> None:
    stack, requests = write_stack(tmp_path, name), dial(250, 100)
    found = assert_as_replayed(
        ReplayOptions(stack=stack, trace=TRACE, requests=requests, block_bytes=BLOCK_BYTES), where
    )
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
    path = write_calibration(tmp_path, {"far": 2e-6})
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
    path = write_calibration(tmp_path, {"fs": disk})
    stack = write_stack(tmp_path, "arc")
    options = ReplayOptions(stack=stack, workload="chat", requests=120, block_bytes=BLOCK_BYTES)

    def run() -> Simulated:
        return next(Simulation(SimulateOptions(stack, options, path, 10_000.0), grid([])).run())

    waiting = run()
    write_stack(tmp_path, "arc", prefill_tokens_per_second=10_000)
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
    path = write_calibration(tmp_path, {"near": 1e-5})
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

"""`kvtier replay` as people run it, over the real tiers: what it prints, writes, leaves behind and answers."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from support_counts import full_alone
from support_replay import run

from faults.machine import warm
from kvtier.cli import main
from kvtier.stack import TierStack
from kvtier.tools.replay.run import Replay
from kvtier.tools.replay.setup import ReplayOptions, read_config
from kvtier.types.jobs import JobResult, TransferJob

pytestmark = pytest.mark.usefixtures("temporary_folder")
SMALL = ("--block-bytes", "4KiB", "--requests", "120", "--cpu-blocks", "300", "--fs-blocks", "3000")


def figures(tmp_path: Path, *args: str) -> dict[str, Any]:
    path = tmp_path / "figures.json"
    result = run(*args, "--json", str(path))
    assert result.exit_code == 0, result.output
    told: dict[str, Any] = json.loads(path.read_text())
    return told


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, dict[str, Any]]:
    """The command with no arguments but where to write its figures."""
    path = tmp_path_factory.mktemp("bare") / "figures.json"
    return CliRunner().invoke(main, ["replay", "--json", str(path)]), json.loads(path.read_text())


def test_with_no_arguments_every_tier_is_hit_and_every_byte_right(bare: tuple[Result, dict[str, Any]]) -> None:
    result, told = bare
    assert result.exit_code == 0
    assert "every byte right" in result.output
    assert all(told["hit_tokens"][tier] > 0 for tier in ("gpu", "cpu", "fs"))
    blocks = told["blocks"]
    assert blocks["verified"] == blocks["loaded"] > 0
    assert (blocks["mismatched"], blocks["dropped"]) == (0, 0)
    assert sum(told["hit_tokens"].values()) < told["prompt_tokens"]


def test_the_figures_hold_what_is_promised(bare: tuple[Result, dict[str, Any]]) -> None:
    _, told = bare
    promised = {
        *("hits", "load_bytes", "load_seconds", "store_bytes", "store_seconds"),
        *("evictions", "dropped", "used_bytes", "peak_bytes", "capacity_bytes"),
    }
    for tier in ("gpu", "cpu", "fs"):
        assert promised <= told["tiers"][tier].keys()
        assert all(isinstance(told["tiers"][tier][name], int | float) for name in promised)
        assert 0 < told["tiers"][tier]["used_bytes"] <= told["tiers"][tier]["peak_bytes"]
        assert told["tiers"][tier]["peak_bytes"] <= told["tiers"][tier]["capacity_bytes"]
    for tier in ("cpu", "fs"):
        assert told["tiers"][tier]["evictions"] > 0
        assert told["tiers"][tier]["load_bytes"] > 0
        assert told["tiers"][tier]["load_seconds"] > 0
    assert told["requests"] == 400


def test_the_default_stacks_storage_is_removed(temporary_folder: Path) -> None:
    assert run(*SMALL, "--requests", "5").exit_code == 0
    assert list(temporary_folder.iterdir()) == []


def test_a_second_run_hits_what_the_first_left_on_disk(tmp_path: Path) -> None:
    args = (*SMALL, "--fs-root", str(tmp_path / "root"))
    first = figures(tmp_path, *args)
    second = figures(tmp_path, *args)
    assert (first["blocks"]["recovered"], first["blocks"]["loaded_of_recovered"]) == (0, 0)
    assert second["blocks"]["recovered"] > 0
    assert second["blocks"]["loaded_of_recovered"] > 0
    assert second["hit_tokens"]["fs"] > first["hit_tokens"]["fs"]
    assert second["blocks"]["mismatched"] == 0


def test_a_seed_decides_the_figures(tmp_path: Path) -> None:
    def decided(seed: str) -> dict[str, Any]:
        told = figures(tmp_path, *SMALL, "--requests", "60", "--seed", seed)
        return {name: told[name] for name in ("prompt_tokens", "hit_tokens", "block_hits", "blocks")}

    assert decided("7") == decided("7")
    assert decided("7") != decided("8")


def test_a_hybrid_layout_goes_through_all_tiers(tmp_path: Path) -> None:
    args = ("--workload", "hybrid", "--requests", "120", "--block-bytes", "1KiB", "--cpu-blocks", "100")
    told = figures(tmp_path, *args)
    assert all(told["hit_tokens"][tier] > 0 for tier in ("gpu", "cpu", "fs"))
    assert (told["blocks"]["mismatched"], told["settings"]["block_size_factor"]) == (0, 4)


@pytest.mark.parametrize("rows", ["1", pytest.param("5", marks=full_alone())])
def test_prefixes_longer_than_the_cpu_tier_are_loaded(tmp_path: Path, rows: str) -> None:
    told = figures(tmp_path, *SMALL, "--cpu-blocks", rows, "--requests", "40")
    assert told["blocks"]["longest_load"] > int(rows)
    assert told["blocks"]["loaded"] > 0
    assert told["blocks"]["mismatched"] == 0


@pytest.mark.parametrize("args", [("--concurrency", "4"), ("--store-mode", "lazy"), ("--policy", "arc")])
def test_other_ways_to_serve_end_with_every_byte_right(tmp_path: Path, args: tuple[str, ...]) -> None:
    told = figures(tmp_path, *SMALL, *args)
    assert told["requests"] == 120
    assert told["blocks"]["mismatched"] == 0
    assert told["blocks"]["loaded"] > 0


def test_a_trace_is_replayed(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 0, "input_length": 512 * 40, "output_length": 1, "hash_ids": list(range(base, base + 40))}
        for base in (0, 100, 200, 0)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    told = figures(tmp_path, "--trace", str(path), "--block-bytes", "1KiB", "--cpu-blocks", "8", "--fs-blocks", "500")
    assert (told["block_references"], told["block_hits"], told["block_hit_rate"]) == (160, 40, 0.25)
    assert told["hit_tokens"] == {"gpu": 0, "cpu": 0, "fs": 39 * 512}
    assert (told["requests"], told["prompt_tokens"], told["blocks"]["loaded"]) == (4, 512 * 160, 39)


def test_a_stack_file_decides_the_tiers(tmp_path: Path) -> None:
    stack = tmp_path / "stack.yaml"
    stack.write_text("tiers:\n- {type: gpu, name: hbm}\n- {type: cpu, name: dram, cpu_bytes_to_use: 2MiB}\n")
    told = figures(tmp_path, str(stack), "--block-bytes", "4KiB", "--requests", "60")
    assert list(told["tiers"]) == ["hbm", "dram"]
    assert told["tiers"]["dram"]["capacity_bytes"] == 2 << 20
    assert told["hit_tokens"]["hbm"] > 0
    assert told["hit_tokens"]["dram"] > 0


STATEFUL = """
stats_socket: {0}/stats
state_dir: {0}/state
tiers:
- {{type: gpu}}
- {{type: cpu, cpu_bytes_to_use: 2MiB}}
"""
BUDGETED = "- {{type: fs, roots: [{0}/root], capacity: 16MiB, admit: predicted, write_bytes_per_day: 1GiB}}\n"
SHARED = "- {{type: shared_fs, root: {0}/shared, capacity: 16MiB}}\n"


@pytest.mark.parametrize(
    ("tiers", "options", "state"),
    [
        (BUDGETED, {}, "state"),
        (BUDGETED, {"policy": "arc"}, "state"),
        (BUDGETED, {"fs_root": "other"}, "other"),
        (BUDGETED, {"server": "embedded"}, "scratch"),
        (SHARED, {}, "scratch"),
        ("", {}, "scratch"),
    ],
)
def test_only_a_replay_over_the_stacks_own_roots_goes_on_with_its_state(
    tmp_path: Path, tiers: str, options: dict[str, Any], state: str
) -> None:
    stack = tmp_path / "stack.yaml"
    stack.write_text((STATEFUL + tiers).format(tmp_path))
    options = {name: tmp_path / value if name == "fs_root" else value for name, value in options.items()}
    config = read_config(ReplayOptions(stack=stack, **options), tmp_path / "scratch")
    assert (config.state_dir, config.stats_socket) == (str(tmp_path / state), "")


def test_a_trial_leaves_the_write_budget_of_the_stack_alone(tmp_path: Path) -> None:
    stack = tmp_path / "stack.yaml"
    stack.write_text((STATEFUL + BUDGETED).format(tmp_path))
    sizes = ("--block-bytes", "4KiB", "--requests", "20")
    figures(tmp_path, str(stack), *sizes)
    before = {path.name: path.read_bytes() for path in (tmp_path / "state").iterdir()}
    assert "model-writes-1" in before
    figures(tmp_path, str(stack), *sizes, "--fs-root", str(tmp_path / "other"))
    assert {path.name: path.read_bytes() for path in (tmp_path / "state").iterdir()} == before
    assert (tmp_path / "other" / "model-writes-1").exists()


def test_one_wrong_byte_makes_exit_code_1(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run_job = TierStack.run
    flips = iter([None])

    async def corrupting(stack: TierStack, job: TransferJob) -> JobResult:
        result = await run_job(stack, job)
        for _ in flips if job.kind == "load" else ():
            block = int(job.groups[0].runs.gpu_blocks[0])
            stack._parts.kv_caches[0].numpy().view(np.uint8)[block, 4095] ^= 0x80
        return result

    monkeypatch.setattr(TierStack, "run", corrupting)
    path = tmp_path / "figures.json"
    result = run(*SMALL, "--json", str(path))
    assert result.exit_code == 1
    assert "WRONG BYTES" in result.output
    told = json.loads(path.read_text())
    assert (told["ok"], told["blocks"]["mismatched"]) == (False, 1)
    assert "1 bytes differ from byte 4095 on; it holds its own bytes otherwise" in told["wrong"][0]


BAD = [
    (["{tmp}/absent.yaml"], "does not exist"),
    (["--trace", "{tmp}/absent.jsonl"], "cannot read the trace"),
    (["--trace", "{tmp}/bad.jsonl"], "bad.jsonl:2: not a JSON object"),
    (["--trace", "{tmp}/bad.jsonl", "--workload", "chat"], "choose one of --trace and --workload"),
    (["--block-bytes", "10 bananas"], "'10 bananas' is not a size"),
    (["--block-bytes", "0"], "at least one byte"),
    (["--block-bytes", "1TiB"], "lower --block-bytes"),
    (["--block-tokens", "16"], "--block-tokens: goes with --trace"),
    (["--requests", "0"], "--requests"),
    (["--workload", "poetry"], "--workload"),
    (["--gpu-blocks", "5"], "--gpu-blocks: the longest request has"),
    (["--fs-root", "{tmp}/no/such/folder"], "no/such"),
    (["{tmp}/cpu.yaml", "--fs-blocks", "9"], "--fs-blocks: the stack has no FS tier"),
    (["{tmp}/typo.yaml"], "cpu_bytes_to_sue"),
    (["{tmp}/small.yaml"], "cpu_bytes_to_use: 1000 bytes hold no block"),
    (["--json", "{tmp}/no/figures.json"], "--json: cannot write"),
    (["--frobnicate"], "--frobnicate"),
]


@pytest.mark.parametrize(("args", "reason"), BAD)
def test_bad_input_is_one_line_and_exit_code_2(
    tmp_path: Path, temporary_folder: Path, args: list[str], reason: str
) -> None:
    good = {"input_length": 5, "output_length": 1, "hash_ids": [1]}
    (tmp_path / "bad.jsonl").write_text(f"{json.dumps(good)}\nrubbish\n")
    (tmp_path / "cpu.yaml").write_text("tiers: \n- type: gpu\n- type: cpu\n  cpu_bytes_to_use: 8MiB\n")
    (tmp_path / "typo.yaml").write_text("tiers: \n- type: gpu\n- type: cpu\n  cpu_bytes_to_sue: 8MiB\n")
    (tmp_path / "small.yaml").write_text("tiers: \n- type: gpu\n- type: cpu\n  cpu_bytes_to_use: 1000\n")
    result = run(*(arg.format(tmp=tmp_path) for arg in args))
    assert result.exit_code == 2
    lines = result.output.splitlines()
    assert [line.startswith("error: ") for line in lines] == [True] * len(lines)
    assert any(reason in line for line in lines)
    assert len(lines) == 1 or "typo" in args[0]
    assert list(temporary_folder.iterdir()) == []


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_leaves_nothing_behind(tmp_path: Path, temporary_folder: Path, sent: signal.Signals) -> None:
    """The signal comes while requests are served: the run's folder holds slab files by then."""
    # what a shell starts in the background ignores Ctrl-C, and so does what it starts
    heed = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    script = f"{heed}; from kvtier.cli import main; main()"
    args = [sys.executable, "-c", script, "replay", "--requests", "4000"]
    environment = {**os.environ, "TMPDIR": str(temporary_folder)}
    with warm.Popen(args, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        while process.poll() is None and not list(temporary_folder.glob("*/fs/slab*")):
            pass
        process.send_signal(sent)
        stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, stdout) == (130, ""), stderr
    assert "interrupted; temporary storage is removed" in stderr
    assert list(temporary_folder.iterdir()) == []


def test_progress_is_told_once_for_each_request() -> None:
    prepared = Replay(ReplayOptions(requests=9, block_bytes=64, cpu_blocks=99, fs_blocks=99))
    ticks: list[int] = []
    report = asyncio.run(prepared.run(lambda: ticks.append(1)))
    assert len(ticks) == prepared.source.num_requests == report.counts.requests == 9

"""`kvtier replay --service SOCKET`: engines at one `kvtier serve`, which hit what the others stored."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path

import pytest
from support_replay import run
from support_service import stack_process
from support_tools import refusal

from kvtier.tools.replay.run import Replay
from kvtier.tools.replay.setup import ReplayOptions

SMALL = ("--block-bytes", "4KiB", "--requests", "60")
STACK = "tiers:\n  - {{type: cpu, cpu_bytes_to_use: {rows}}}\n  - {{type: fs, roots: ['{root}'], capacity: 64MiB}}\n"


@pytest.fixture
def stack(tmp_path: Path) -> Path:
    path = tmp_path / "stack.yaml"
    path.write_text(STACK.format(rows="4MiB", root=tmp_path / "root"))
    return path


@pytest.mark.parametrize(("workload", "concurrency"), [("chat", "1"), ("hybrid", "4")])
def test_a_second_replay_hits_what_the_first_one_stored(
    stack: Path, tmp_path: Path, workload: str, concurrency: str
) -> None:
    path, found = str(tmp_path / "socket"), []
    with stack_process(stack, path):
        for number in range(2):
            file = tmp_path / f"{number}.json"
            options = ("--workload", workload, "--concurrency", concurrency, "--json", str(file))
            result = run("--service", path, *SMALL, *options)
            assert result.exit_code == 0, result.output
            assert "every byte right" in result.output
            found.append(json.loads(file.read_text()))
    first, second = (each["blocks"] for each in found)
    assert (first["stored"] > 100, first["loaded_of_recovered"], first["dropped"]) == (True, 0, 0)
    assert second["loaded_of_recovered"] == second["loaded"] > 100
    assert second["stored"] < first["stored"] / 4
    assert found[1]["block_hit_rate"] > found[0]["block_hit_rate"]
    assert found[1]["settings"]["service"] == path
    assert set(found[1]["tiers"]) == {"gpu", "cpu", "fs"}


def test_it_goes_on_with_misses_when_the_service_is_killed(stack: Path, tmp_path: Path) -> None:
    path, served = str(tmp_path / "socket"), 0
    with stack_process(stack, path) as process:

        def advance() -> None:
            nonlocal served
            served += 1
            if served == 20:
                process.send_signal(signal.SIGKILL)
                process.wait()

        replay = Replay(ReplayOptions(service=path, block_bytes=4096, requests=60))
        report = asyncio.run(replay.run(advance))
    assert report.ok
    assert report.counts.requests == 60
    assert report.counts.block_hits > 0


@pytest.mark.parametrize(
    "options",
    [("stack.yaml",), ("--fs-root", "x"), ("--cpu-blocks", "9"), ("--server", "embedded"), ("--metrics-port", "0")],
)
def test_what_the_service_decides_is_no_option(options: tuple[str, ...], tmp_path: Path) -> None:
    shown = refusal("replay", "--service", str(tmp_path / "socket"), *options)
    assert "is the service's own" in shown
    assert (options[0] if options[0].startswith("--") else "STACK.yaml") in shown


def test_without_a_service_it_is_one_line(tmp_path: Path) -> None:
    assert "no stack process answers at" in refusal("replay", "--service", tmp_path / "socket")

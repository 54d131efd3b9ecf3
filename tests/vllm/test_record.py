"""The trace that a real vLLM leaves: what was asked, with equal ids where prompts are equal, fit for a replay."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from click.testing import CliRunner
from engines import BLOCK, SEED, engine, prompts, stack, stack_process

from kvtier.cli import main
from kvtier.traces.read import TraceLine, read_lines, read_trace

pytestmark = [pytest.mark.engine, pytest.mark.timeout(3600)]


def recording(root: Path, folder: Path, **more: str) -> dict[str, object]:
    return stack(root, 600) | {"record": {"folder": str(folder), **more}}


def lines_in(folder: Path) -> list[TraceLine]:
    return [line for path in sorted(folder.glob("*.jsonl.gz")) for line in read_lines(path)]


def common(left: list[int], right: list[int]) -> int:
    return next((at for at, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


def test_requests_are_in_the_trace_with_their_lengths_and_shared_prefixes(models, root, tmp_path):
    folder, asked = tmp_path / "traces", [*prompts(SEED), prompts(SEED)[0][: BLOCK - 1]]
    with engine(models["llama"], tmp_path, recording(root, folder)) as vllm:
        for number, prompt in enumerate(asked):
            vllm.generate([prompt], tokens=3 + number)
    found = lines_in(folder)
    assert [line.input_length for line in found] == [len(prompt) for prompt in asked]
    assert [line.output_length for line in found] == [3 + number for number in range(len(asked))]
    assert [len(line.hash_ids) for line in found] == [len(prompt) // BLOCK for prompt in asked]
    assert [line.seconds() for line in found] == sorted(line.seconds() or 0.0 for line in found)
    shared = 0
    for one, first in zip(found, asked, strict=True):
        for other, second in zip(found, asked, strict=True):
            assert common(one.hash_ids, other.hash_ids) == common(first, second) // BLOCK
            shared += one is not other and common(first, second) >= BLOCK
    assert shared, "the prompts share no prefix"
    (path,) = folder.glob("*.jsonl.gz")
    assert read_trace(path).block_tokens == BLOCK
    told = CliRunner().invoke(main, ["replay", "--trace", str(path), "--block-bytes", "4KiB"])
    assert told.exit_code == 0, told.output
    assert "every byte right" in told.output


def test_what_is_killed_leaves_what_was_written_and_a_salt_makes_starts_comparable(
    models, root, tmp_path, short_folder
):
    """An engine and its stack process, which writes the trace and would serve the next engine too."""
    folder, salt = tmp_path / "traces", tmp_path / "salt"
    config = recording(root, folder, salt_file=str(salt)) | {"runtime_dir": short_folder}
    with engine(models["llama"], tmp_path, config) as vllm:
        vllm.generate(prompts(SEED)[:2])
    with engine(models["llama"], tmp_path, config) as vllm:
        vllm.generate(prompts(SEED)[:2])
        vllm.kill()
        os.kill(stack_process(short_folder), signal.SIGKILL)
    with engine(models["llama"], tmp_path, config) as vllm:
        vllm.generate(prompts(SEED)[:2])
    first, *_, last = [[line.hash_ids for line in read_lines(path)] for path in sorted(folder.glob("*.jsonl.gz"))]
    assert sorted(first) == sorted(last)
    assert first[0]

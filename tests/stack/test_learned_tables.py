"""What `policy: reuse` has learned is there after a restart, and `kvtier ls --policy` says it in words."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from support_logs import complaints

from faults.machine import warm
from faults.stepped import SteppedStack
from kvtier.cli import main
from kvtier.config import open_stack, parse_stack, stack_parts
from kvtier.config.load import StackConfig
from kvtier.policy.reuse.prediction.classes import NUM_BUCKETS, NUM_CLASSES, USES
from kvtier.policy.reuse.prediction.model import ReuseModel
from kvtier.stack import TierStack
from kvtier.stack.learned.model_files import model_path, read, write
from kvtier.types.geometry import KVLayout
from kvtier.types.keys import RequestId, make_key

PAGE = 4096
LAYOUT = KVLayout.of_pages(PAGE, block_size=16)
PROMPTS = 40


def config(root: Path, state_dir: str = "") -> StackConfig:
    disk = f"{{type: fs, roots: [{root}], capacity: 64MiB, min_free_bytes: 0, policy: reuse}}"
    cpu = f"{{type: cpu, cpu_bytes_to_use: {16 * PAGE}, policy: reuse}}"
    tiers = ["{type: gpu}", cpu, *([] if state_dir else [disk])]
    return parse_stack(f"state_dir: '{state_dir}'\ntiers: [{', '.join(tiers)}]")


def engine(stack: StackConfig) -> SteppedStack:
    return SteppedStack(stack_parts(stack, LAYOUT, [torch.zeros((4, PAGE), dtype=torch.uint8)], model="m"))


def model(stack: SteppedStack | TierStack) -> ReuseModel:
    assert stack._assembled is not None
    models = stack._assembled.plane.control.models
    (only,) = models
    assert isinstance(only, ReuseModel)
    return only


def serve(stack: SteppedStack | TierStack) -> None:
    """Prompts of four blocks, of which every second one comes back, after a minute."""
    for turn in range(3 * PROMPTS):
        prompt = f"{turn // 3} {turn % 3 // 2}"
        keys = [make_key(random.Random(f"{prompt} {block}").randbytes(16), 0) for block in range(4)]
        stack.request(RequestId(str(turn)), keys, time=60.0 * turn).end(10)


def returns(learned: ReuseModel) -> float:
    """How many returns the tables count after the first use of a prompt."""
    first = NUM_CLASSES * NUM_BUCKETS // len(USES)
    return sum(learned.tables.ended[:first])


@pytest.mark.parametrize("place", ["root", "state_dir"])
def test_an_engine_finds_its_tables_again(tmp_path: Path, caplog: pytest.LogCaptureFixture, place: str) -> None:
    (tmp_path / "root").mkdir(mode=0o700)
    stacks = config(tmp_path / "root", "" if place == "root" else str(tmp_path / "state"))
    with engine(stacks) as stack:
        assert returns(model(stack)) == 0
        serve(stack)
        saved = model(stack).save()
    with engine(stacks) as stack:
        assert model(stack).save() == saved
        assert returns(model(stack)) > 0.7 * PROMPTS
        stack.reset()
    assert read(tmp_path / ("root" if place == "root" else "state"), "reuse") == saved
    assert complaints(caplog) == []


def test_an_asyncio_program_finds_them_again(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir(mode=0o700)

    async def life() -> tuple[float, float]:
        tensors = [torch.zeros((4, PAGE), dtype=torch.uint8)]
        async with open_stack(config(tmp_path / "root"), LAYOUT, tensors, model="m") as stack:
            before = returns(model(stack))
            serve(stack)
            return before, returns(model(stack))

    assert asyncio.run(life())[0] == 0
    assert asyncio.run(life())[0] > 0.7 * PROMPTS


def test_damaged_tables_are_one_line_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = tmp_path / "root"
    root.mkdir(mode=0o700)
    with engine(config(root)) as stack:
        serve(stack)
    path = model_path(root, "reuse")
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with engine(config(root)) as stack:
        assert returns(model(stack)) == 0
    (line,) = complaints(caplog)
    assert line.levelno == logging.WARNING
    assert str(path) in line.getMessage()


LIVES_ON = """
import sys
from pathlib import Path
import kvtier.stack.learned.model_files
from test_learned_tables import config, engine, serve
kvtier.stack.learned.model_files.SAVE_SECONDS = 0.0
with engine(config(Path(sys.argv[1]))) as stack:
    serve(stack)
    print("served", flush=True)
    while True:
        stack.request("none").end()
"""


def saved_ns(path: Path) -> int:
    """When tables were saved last; 0 if they were not."""
    return path.stat().st_mtime_ns if path.exists() else 0


def test_a_killed_process_leaves_the_tables_that_it_saved_last(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir(mode=0o700)
    command = [sys.executable, "-c", LIVES_ON, str(root)]
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    path_saved = model_path(root, "reuse")
    with warm.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path}) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == b"served\n"
            seen = saved_ns(path_saved)
            for _ in range(2):  # the second one began after all was served
                while (now := saved_ns(path_saved)) == seen:
                    assert child.poll() is None
                seen = now
        finally:
            child.kill()
    with engine(config(root)) as stack:
        assert returns(model(stack)) > 0.7 * PROMPTS


def ls(folder: Path, *more: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["ls", str(folder), "--policy", *more])
    return result.exit_code, result.output


def test_ls_says_what_was_learned(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir(mode=0o700)
    with engine(config(root)) as stack:
        serve(stack)
        described = list(model(stack).describe())
        code, text = ls(root)
        assert code == 2, "nothing is saved yet"
    code, text = ls(root)
    assert code == 0
    assert re.search(r"after its first use a prompt comes back within 243 s in [45]\d% \(\d\d returns", text)
    assert "after its third to fifth use no prompt was seen to come back" in text
    code, text = ls(root, "--json")
    (found,) = json.loads(text)["models"]
    assert code == 0
    assert found["model"] == "reuse"
    assert found["bytes"] == model_path(root, "reuse").stat().st_size
    assert (found["learned"], found["fault"]) == (described, None)


def damaged(folder: Path) -> dict[str, Any]:
    return {
        "cut": lambda: model_path(folder, "reuse").write_bytes(b"KVTIERML"),
        "another version": lambda: write(folder, "reuse", b"kvtier reuse 0\n"),
        "not installed": lambda: write(folder, "else", b"x"),
        "link": lambda: model_path(folder, "reuse").symlink_to("/dev/zero"),
        "fifo": lambda: os.mkfifo(model_path(folder, "reuse")),
    }


@pytest.mark.parametrize("fault", damaged(Path()))
def test_ls_says_what_it_cannot_read(tmp_path: Path, fault: str) -> None:
    damaged(tmp_path)[fault]()
    code, text = ls(tmp_path)
    assert code == 2
    assert "cannot be read: " in text
    found = json.loads(ls(tmp_path, "--json")[1])["models"][0]
    assert found["fault"]
    assert not found["learned"]


def test_ls_says_where_nothing_was_learned(tmp_path: Path) -> None:
    code, text = ls(tmp_path)
    assert code == 2
    assert "keeps nothing that policies have learned" in text
    code, text = ls(tmp_path / "missing")
    assert code == 2
    assert "No such file" in text

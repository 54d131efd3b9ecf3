"""Every command ends with a status and at most one line, whatever its output can take."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support_tools import write

from faults.machine import warm
from kvtier.cli import COMMANDS

PAGES = ["--layout", "full:page=4KiB,block=16"]
STACK = """
tiers:
  - type: gpu
  - {{type: cpu, cpu_bytes_to_use: 1MiB}}
  - {{type: fs, roots: [{root}], capacity: 8MiB, min_free_bytes: 0, io_engine: threads, direct: off}}
"""
RUNS: dict[str, list[str]] = {
    "help": ["--help"],
    "version": ["--version"],
    "help of a command": ["gc", "--help"],
    "advise": ["advise", "--trace", "trace"],
    "bench": ["bench", "stack", *PAGES, "--seconds", "0.01", "--sizes", "", "--bytes", "1MiB", "--device", "cpu"],
    "check": ["check", "stack", *PAGES],
    "check, JSON": ["check", "stack", "--json", *PAGES],
    "check, schema": ["check", "--schema"],
    "du": ["du", "root"],
    "du, JSON": ["du", "root", "--json"],
    "fsck": ["fsck", "root"],
    "gc": ["gc", "root", "--old", "--dry-run"],
    "ls": ["ls", "root"],
    "ls, JSON": ["ls", "root", "--json"],
    "record": ["record", "trace"],
    "replay": ["replay", "--requests", "2", "--block-bytes", "4096", "--cpu-blocks", "64", "--fs-blocks", "64"],
    "simulate": ["simulate", "stack", "--trace", "trace", "--block-bytes", "4096"],
    "top": ["top", "socket", "--once", "--interval", "0"],
    "top, JSON": ["top", "socket", "--once", "--interval", "0", "--json"],
}
OUTPUTS: dict[str, tuple[int, str]] = {
    "utf-8": (0, ""),
    "latin-1": (0, ""),
    "ascii": (0, ""),
    "full": (2, "error: the output: No space left on device"),
    "gone": (1, ""),
    "closed": (0, ""),
}
"""By what the output is: the status that a command ends with, and its last line on stderr."""

DRIVER = r"""
import contextlib, io, json, os, sys
folder, runs, outputs = sys.argv[1], *map(json.loads, sys.argv[2:4])
sys.path[:0] = sys.argv[4:]
from support_stack import PLAIN, Engine, parts_of, stack_file
from kvtier.cli import main
from support_driver import ServedStack

def output(kind):
    if kind == "closed":
        return None
    if kind == "full":
        return open("/dev/full", "w")
    if kind == "gone":
        read, written = os.pipe()
        os.close(read)
        return open(written, "w")
    return io.TextIOWrapper(io.BytesIO(), encoding=kind)

def run(words, kind):
    sys.stdout, sys.stderr, printed = output(kind), io.StringIO(), b""
    real = sys.stdout
    try:
        main(words, prog_name="kvtier")
        status = "returned"
    except SystemExit as end:
        status = end.code
    except BaseException as error:
        status = repr(error)
    if kind in ("utf-8", "latin-1", "ascii"):
        printed = real.buffer.getvalue().decode(kind)
    lines = sys.stderr.getvalue().splitlines()
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
    if real is not None:
        with contextlib.suppress(OSError):
            real.close()
    return {"status": status, "printed": len(printed), "errors": lines}

os.chdir(folder)
with ServedStack(parts_of(stack_file(PLAIN, 8, stats_socket=os.path.join(folder, "socket")), Engine(PLAIN, 8))):
    found = {name: {kind: run(words, kind) for kind in outputs} for name, words in runs.items()}
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a root, a stack file and a trace for the commands."""
    folder = tmp_path_factory.mktemp("output")
    write(folder / "root")
    (folder / "stack").write_text(STACK.format(root=folder / "other"))
    line = {"timestamp": 0, "input_length": 30, "output_length": 5, "hash_ids": [1, 2]}
    (folder / "trace").write_text("".join(json.dumps(line | {"timestamp": 900 * n}) + "\n" for n in range(3)))
    return folder


@pytest.fixture(scope="module")
def found(place: Path) -> dict[str, dict[str, Any]]:
    """What each run did with each output. One process makes all of them: each would load torch again."""
    paths = [os.path.dirname(__file__) + "/../support", *sys.path]
    command = [sys.executable, "-c", DRIVER, str(place), json.dumps(RUNS), json.dumps(list(OUTPUTS)), *paths]
    done = warm.run(command, check=False, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    runs: dict[str, dict[str, Any]] = json.loads(done.stdout)
    return runs


def test_every_command_is_among_the_runs():
    assert {words[0] for words in RUNS.values()} >= set(COMMANDS)


@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("run", RUNS)
def test_a_command_ends_with_its_status_and_no_traceback(run: str, output: str, found: dict[str, dict[str, Any]]):
    status, last = OUTPUTS[output]
    ended = found[run][output]
    assert ended["status"] == status, ended
    errors = [line for line in ended["errors"] if not line.startswith("note: ")]
    assert errors == ([last] if last else [])
    assert bool(ended["printed"]) == (output in ("utf-8", "latin-1", "ascii"))


def process(place: Path, *words: str, stdout: Any = subprocess.PIPE, **more: Any) -> subprocess.CompletedProcess[str]:
    """A command as an operator runs it, whose last output is written when the interpreter ends. One with an environment
    or errors of its own needs an interpreter that starts with them."""
    code = "from kvtier.cli import main; main(prog_name='kvtier')"
    command = [sys.executable, "-c", code, *words]
    kept = {"stderr": subprocess.PIPE, "text": True, "cwd": place, "timeout": 60} | more
    if more:
        return subprocess.run(command, check=False, stdout=stdout, **kept)
    return warm.run(command, whole_end=True, check=False, stdout=stdout, **kept)


@pytest.mark.parametrize("words", [["check", "--schema"], ["ls", "root"], ["--help"]], ids=" ".join)
def test_a_full_device_at_the_end_of_a_process(place: Path, words: list[str]):
    with open("/dev/full", "w") as full:
        ended = process(place, *words, stdout=full)
    assert (ended.returncode, ended.stderr) == (2, "error: the output: No space left on device\n")


@pytest.mark.parametrize("words", [["check", "--schema"], ["ls", "no such root"]], ids=" ".join)
def test_neither_output_nor_errors_can_be_written(place: Path, words: list[str]):
    with open("/dev/full", "w") as full:
        assert process(place, *words, stdout=full, stderr=full).returncode == 2


def test_files_are_utf_8_under_any_locale(place: Path):
    ascii_only = os.environ | {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    page = place / "page.html"
    simulated = ["simulate", "stack", "--trace", "trace", "--block-bytes", "4096", "--html", str(page)]
    ended = process(place, *simulated, env=ascii_only)
    assert ended.returncode == 0, ended.stderr
    assert "</html>" in page.read_text("utf-8")


def test_names_that_no_encoding_has_are_printed(tmp_path: Path):
    """A file name of any bytes, as the system gives it."""
    odd = os.fsdecode(bytes(tmp_path) + b"/\xff.jsonl")
    line = {"timestamp": 0, "input_length": 30, "output_length": 5, "hash_ids": [1, 2]}
    Path(odd).write_text(json.dumps(line) + "\n")
    ended = process(tmp_path, "record", odd)
    assert ended.returncode == 0, ended.stderr
    assert "?.jsonl" in ended.stdout

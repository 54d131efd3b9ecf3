"""Resources that the kernel refuses: io_uring, and shared memory for all the rows."""

from __future__ import annotations

import errno
import re
import subprocess
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path

from kvtier.errors import ResourceError

from ..attack import Attack, Budget, Tally
from ..driven import Engine, driven
from ..machine.child import Child, Line
from ..machine.seccomp import (
    IO_URING_SETUP,
    URING_FOR_ADMINISTRATORS,
    URING_SWITCH,
    deny,
    drop_administration,
    switch_can_be_set,
    without_filter,
)
from ..machine.undo import Machine
from ..machine.watch import Heard
from ..suite import PROJECT

LAYOUTS = ("slab", "files")
ROW_BYTES = 65536

# ---- no io_uring

DENIALS = ("EPERM", "ENOSYS", "the kernel's switch")
SUITES = ("tests/tiers/fs_local/test_*.py", "tests/tiers/fs_shared/test_*.py")


def uring_denied(budget: Budget) -> Tally:
    """Processes without io_uring: threads serve, and one line of the log says so; long: the tests of the tier too."""
    tally = Tally()
    denials = DENIALS if switch_can_be_set() else DENIALS[:2]
    for number in range(budget.count):
        denial = denials[number % len(denials)]
        folder = budget.folder / str(number)
        folder.mkdir()
        if denial in DENIALS[:2]:
            child = Child(partial(_life_under_a_filter, folder, denial, budget.long or not number))
            _take_over(tally, child, denial)
        else:
            _lives_without_the_switch(tally, folder)
        tally.iterations += 1
    tally.notes["kernel switches turned"] = len(denials) - 2
    return tally


def _take_over(tally: Tally, child: Child, what: str, seconds: float = 3000.0) -> None:
    """Add what a child found. A child that hangs, or dies without a report, is a finding too."""
    try:
        said = child.line.hear("found", seconds)
        status = child.ended(20.0)
    except (TimeoutError, RuntimeError) as error:
        status = child.ended(0.0 if isinstance(error, TimeoutError) else 5.0)
        tally.hangs += isinstance(error, TimeoutError)
        tally.expect(False, f"{what}: {error}; it ended with {status}")
        return
    tally.add(Tally.from_json(said["tally"]))
    tally.expect(status == 0, f"{what}: ended with {status}")


def _life_under_a_filter(folder: Path, denial: str, all_of_it: bool, line: Line) -> None:
    tally = Tally()
    deny(IO_URING_SETUP, getattr(errno, denial))
    for layout in LAYOUTS:
        _without_a_ring(tally, folder / layout, layout, denial)
    if all_of_it:
        _checked(tally, folder, denial)
    if all_of_it and len(sys.argv) > 1 and "--long" in sys.argv:
        _tests_pass(tally, denial)
    line.say("found", tally=tally.as_json())


def _lives_without_the_switch(tally: Tally, folder: Path) -> None:
    """The switch holds for the whole machine, so it is on for as long as a tier takes to open, and spares root."""
    with Machine() as machine:
        for layout in LAYOUTS:
            what = f"kernel.io_uring_disabled={URING_FOR_ADMINISTRATORS}, {layout}"
            with machine.setting(str(URING_SWITCH), URING_FOR_ADMINISTRATORS):
                child = Child(partial(_life_without_the_switch, folder / layout, layout, what))
                with suppress(TimeoutError, RuntimeError):  # such a child brings no report either, which is a finding
                    child.line.hear("open", 60.0)
            _take_over(tally, child, what)


def _life_without_the_switch(root: Path, layout: str, what: str, line: Line) -> None:
    tally = Tally()
    drop_administration()
    with Heard() as heard, driven(root, layout=layout) as engine:
        line.say("open")
        _served(tally, engine, heard, what)
    line.say("found", tally=tally.as_json())


def _without_a_ring(tally: Tally, root: Path, layout: str, what: str) -> None:
    with Heard() as heard, driven(root, layout=layout) as engine:
        _served(tally, engine, heard, f"{what}, {layout}")
    try:
        with driven(root, layout=layout, io_engine="io_uring"):
            tally.expect(False, f"{what}, {layout}: io_engine: io_uring was accepted")
    except ResourceError as error:
        tally.expect("choose auto or threads" in str(error), f"{what}, {layout}: {error}")


def _served(tally: Tally, engine: Engine, heard: Heard, what: str) -> None:
    """Threads serve, the log says so once, and every byte is right."""
    said = [words for words in heard.lines if "threads serve instead" in words]
    tally.expect(len(said) == 1, f"{what}: said {len(said)} times that threads serve: {heard.lines}")
    tally.expect(", threads, " in engine.lower.mode, f"{what}: runs as {engine.lower.mode}")
    engine.run(requests=40)
    engine.drain(5.0)
    engine.run(requests=20)
    tally.expect(engine.lower.loaded > 0 and engine.lower.failed == 0, f"{what}: {engine.lower}")
    tally.wrong_bytes += len(engine.wrong)
    tally.notes["blocks loaded by threads"] += engine.lower.loaded


def _checked(tally: Tally, folder: Path, what: str) -> None:
    """`kvtier check` says which engine and which mode it would be."""
    stack = folder / "stack.yaml"
    stack.write_text(
        "tiers:\n  - type: gpu\n  - type: cpu\n    cpu_bytes_to_use: 64MiB\n"
        f"  - type: fs\n    roots: [{folder}/checked]\n    capacity: 64MiB\n"
    )
    command = [sys.executable, "-c", "from kvtier.cli import main; main()", "check", str(stack)]
    done = subprocess.run(command, cwd=PROJECT, check=False, capture_output=True, text=True, timeout=120)
    tally.expect(done.returncode == 0 and "slab, threads, " in done.stdout, f"{what}: {done.stdout}{done.stderr}")
    tally.expect(done.stdout.count("threads serve instead") == 1, f"{what}: kvtier check: {done.stdout}")


def _tests_pass(tally: Tally, what: str) -> None:
    """The tests of the tier itself, in this process's children, which inherit the restriction."""
    files = sorted(str(path.relative_to(PROJECT)) for suite in SUITES for path in PROJECT.glob(suite))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
    done = subprocess.run(command, cwd=PROJECT, check=False, capture_output=True, text=True, timeout=2400)
    passed = re.search(r"([0-9]+) passed", done.stdout)
    tally.expect(done.returncode == 0, f"{what}: {done.stdout[-1500:]}")
    tally.notes["tests that passed without a ring"] += int(passed[1]) if passed else 0


ATTACKS = (
    Attack(
        "io_uring denied",
        "seccomp with EPERM and ENOSYS, kernel.io_uring_disabled; long: the tests of the tier under the filter",
        3,
        3,
        uring_denied,
        missing=without_filter,
    ),
)

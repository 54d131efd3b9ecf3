"""All attacks, and how one is run: in a process of its own, under a time limit, so that a hang is a result too."""

from __future__ import annotations

import importlib
import json
import pkgutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from . import attacks
from .attack import Attack, Tally
from .machine import warm

PROJECT = Path(__file__).parents[1]
LONG_IS_TIMES = 100


@dataclass(frozen=True, slots=True)
class Result:
    """One attack that was run, or could not be (`missing`)."""

    attack: Attack
    count: int
    seed: int
    tally: Tally
    seconds: float
    missing: str | None = None


def all_attacks() -> dict[str, Attack]:
    """Every attack by name, in order of module and place in it."""
    found: dict[str, Attack] = {}
    for module in sorted(info.name for info in pkgutil.iter_modules(attacks.__path__)):
        for attack in importlib.import_module(f"{attacks.__name__}.{module}").ATTACKS:
            if attack.name in found:
                raise ValueError(f"two attacks are named {attack.name}")
            found[attack.name] = attack
    return found


def run(attack: Attack, count: int, seed: int, folder: Path | None, *, long: bool) -> Result:
    """Run one attack in a process of its own; the folder (its own, new) is gone afterwards."""
    missing = attack.missing()
    if missing is not None:
        return Result(attack, count, seed, Tally(problems=[missing]), 0.0, missing)
    limit = attack.minutes * 60 * (LONG_IS_TIMES if long else 1)
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kvtier-fault-", dir=folder, ignore_cleanup_errors=True) as own:
        answer = Path(own) / "tally.json"
        work = Path(own) / "work"
        work.mkdir()
        command = [sys.executable, "-m", "faults.one", attack.name, str(count), str(seed), str(work), str(answer)]
        try:
            done = warm.run(
                [*command, *(["--long"] if long else [])],
                cwd=PROJECT, timeout=limit, check=False, capture_output=True, text=True,
            )  # fmt: skip
        except subprocess.TimeoutExpired as late:
            tally = Tally(hangs=1, problems=[f"not done after {limit:.0f} s; last said: {_tail(late.stderr)}"])
        else:
            tally = _tally(answer, done)
    return Result(attack, count, seed, tally, time.monotonic() - begun)


def _tally(answer: Path, done: subprocess.CompletedProcess[str]) -> Tally:
    if answer.exists():
        return Tally.from_json(json.loads(answer.read_text()))
    return Tally(problems=[f"died with status {done.returncode}: {_tail(done.stderr)}"])


def _tail(text: str | bytes | None) -> str:
    if isinstance(text, bytes):
        text = text.decode(errors="replace")
    return (text or "")[-2000:]

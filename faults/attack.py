"""What an attack is, what it gets, and what it reports at the end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Budget:
    """What one run of an attack may use. `count`: iterations; `folder`: a directory of its own, on a real disk."""

    count: int
    seed: int
    folder: Path
    long: bool = False


def add_notes(notes: Counter[str], more: Mapping[str, int]) -> None:
    """Add up figures of several runs; of those that end with `at most` the largest counts."""
    for name, figure in more.items():
        notes[name] = max(notes[name], figure) if name.endswith("at most") else notes[name] + figure


@dataclass(slots=True)
class Tally:
    """What an attack found. The four promises are counts that must be 0; `problems` lists what else went wrong.

    `notes` are figures that show that the attack took place: kills that caught I/O in flight, evictions, bytes moved.
    """

    iterations: int = 0
    wrong_bytes: int = 0
    hangs: int = 0
    leaks: int = 0
    over_bound: int = 0
    notes: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        """Whether every promise held and the attack itself worked."""
        broken = self.wrong_bytes or self.hangs or self.leaks or self.over_bound or self.problems
        return not broken and self.iterations > 0

    def expect(self, held: bool, problem: str) -> None:
        """Record `problem` unless `held`; only the first twenty are kept."""
        if not held and len(self.problems) < 20:
            self.problems.append(problem)

    def add(self, other: Tally) -> None:
        """Add what another part of the same attack found."""
        self.iterations += other.iterations
        self.wrong_bytes += other.wrong_bytes
        self.hangs += other.hangs
        self.leaks += other.leaks
        self.over_bound += other.over_bound
        add_notes(self.notes, other.notes)
        self.problems.extend(other.problems[: 20 - len(self.problems)])

    def as_json(self) -> dict[str, Any]:
        """Plain values, for `json`."""
        return asdict(replace(self, notes=dict(self.notes)))

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Tally:
        """The tally that `as_json` wrote."""
        return cls(**{**values, "notes": Counter(values["notes"])})


def able() -> str | None:
    """For an attack that runs anywhere."""
    return None


@dataclass(frozen=True, slots=True)
class Attack:
    """One row of the suite.

    `how` says how the fault is made. `normal` and `long` are iterations; `minutes` bounds one normal run and a hundred
    times as long a long one, after which it counts as a hang. `missing` returns why this machine cannot make the fault
    (no root, no loop devices), or None. `shards`: how many processes may share the long
    count, each with a seed of its own.
    """

    name: str
    how: str
    normal: int
    long: int
    attack: Callable[[Budget], Tally]
    minutes: float = 3.0
    missing: Callable[[], str | None] = able
    shards: int = 1

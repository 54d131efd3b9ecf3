"""Rows that a session holds of a pool: leases of requests, reservations that wait, copies in flight."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvtier.control.flow.leased_loads import LeasedLoad
from kvtier.control.reservations import Reservation
from kvtier.types.keys import OffloadKey


@dataclass(slots=True, eq=False)
class Waiting:
    """A `Reserve` that has no answer yet: `reservation` once it has begun.

    The first `worth` keys are worth a load; the first `count` are reserved, fewer where there is no room for more.
    """

    number: int
    request: str
    keys: list[OffloadKey]
    worth: int
    count: int
    deadline: float = math.inf
    reservation: Reservation | None = None

    @property
    def is_served(self) -> bool:
        """True if it can be answered."""
        return self.reservation is not None and (self.reservation.served or self.reservation.ended)


@dataclass(slots=True, eq=False)
class Leases:
    """Rows of a request by key, of which `found` without a reservation; the numbers that it waits for.

    `void` are rows leased before a reset, pinned until the engine drops them. `brought`: positions of the lower tiers
    that brought keys up. With `computes` the engine computes what is in no row. `revoked`: the engine was asked for it.
    """

    rows: dict[OffloadKey, int] = field(default_factory=dict)
    found: int = 0
    brought: dict[OffloadKey, int] = field(default_factory=dict)
    waiting: dict[int, Waiting] = field(default_factory=dict)
    void: list[int] = field(default_factory=list)
    computes: bool = False
    revoked: bool = False

    @property
    def num_rows(self) -> int:
        """Rows that are pinned."""
        return len(self.rows) + len(self.void)

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to keep."""
        return not (self.rows or self.void or self.waiting or self.computes)

    def on_reset(self) -> None:
        """Nothing that was leased holds any more. The rows stay pinned."""
        self.void += self.rows.values()
        self.rows.clear()
        self.brought.clear()
        self.computes = False


@dataclass(slots=True, eq=False)
class Copy:
    """A copy that workers of an engine carry out. `left`: those that have not reported. `errors`: of each block.

    `load` is that of the control plane, for rows that hold what was stored; None for a fill, and after a reset.
    `brought`: positions of the lower tiers that brought its keys up.
    A `spare` fill is of no use: its rows are free when it has ended.
    """

    job: int
    rows: list[int]
    generations: list[int]
    left: set[int]
    errors: list[int]
    fills: bool
    spare: bool = False
    load: LeasedLoad | None = None
    brought: dict[OffloadKey, int] = field(default_factory=dict)

    def report(self, worker: int, errors: Sequence[int]) -> bool:
        """A worker's part has ended. True if that was the last."""
        self.errors = [mine or theirs for mine, theirs in zip(self.errors, errors, strict=True)]
        self.left.discard(worker)
        return not self.left

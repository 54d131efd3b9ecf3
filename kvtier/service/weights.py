"""The question whether an engine's workers have other weights than at the start, and what their answers mean."""

from __future__ import annotations

from collections.abc import Collection

from kvtier.service.wire import CHANGED, UNCHANGED, UNKNOWN_WEIGHTS, Weights


class WeightsCheck:
    """`is_open` while blocks may be of other weights than the namespace names: then nothing is served or stored.

    Once a worker has loaded weights that ends when the engine has reset, knowing of the load, and has held back the
    lower tiers. Other verdicts than UNCHANGED end with `HoldBack`, or with a better verdict.
    """

    def __init__(self) -> None:
        self._number = 0
        self._left: set[int] = set()
        self._worst = UNCHANGED
        self._doubted = False
        self._loads = 0
        self._rows_doubted = False

    @property
    def is_open(self) -> bool:
        """True while nothing may be served."""
        return bool(self._left) or self._doubted or self._rows_doubted

    def ask(self, number: int, connected: Collection[int], workers: int) -> Weights | None:
        """All workers are asked. The answer, if one of them is not there."""
        if len(connected) < workers:
            self._left.clear()
            self._doubted = True
            return Weights(number, UNKNOWN_WEIGHTS)
        self._number, self._left, self._worst = number, set(connected), UNCHANGED
        return None

    def on_answer(self, worker: int, number: int, verdict: int) -> Weights | None:
        """A worker has answered; the answer of all when it is the last."""
        if number != self._number or worker not in self._left:
            return None  # of an earlier question
        self._left.discard(worker)
        self._worst = min(self._worst, verdict)
        if self._left:
            return None
        self._doubted = self._worst != UNCHANGED
        return Weights(number, self._worst)

    def on_load(self) -> Weights:
        """A worker loads weights."""
        self._loads += 1
        self._rows_doubted = self._doubted = True
        return Weights(0, CHANGED)

    def on_reset(self, loads: int) -> None:
        """Blocks of before are reachable no more. `loads`: those that the engine knew of when it reset."""
        if loads >= self._loads:
            self._rows_doubted = False

    def on_hold_back(self) -> None:
        """The engine has no namespace any more: its blocks reach no tier that outlives it."""
        self._doubted = False

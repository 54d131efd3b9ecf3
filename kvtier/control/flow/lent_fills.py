"""Stores of engines that copy themselves, into rows that were lent to them: each key once, and every row comes back."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvtier.control.flow.demotions import Demotions
from kvtier.control.state import FillWaiter
from kvtier.control.tiers.slot_table import READY
from kvtier.types.jobs import PRESENT, STORED, BlockOutcome, DropReason, JobKind, dropped, failed
from kvtier.types.keys import GroupIndex, OffloadKey, group_runs


class LentFill(FillWaiter):
    """Copies of an engine into rows lent to it: `keys[i]` into `rows[i]`. One of `fills` while a block has no outcome.

    A key that is there, or that another store fills, needs its row no more: a spare one, free once the copies have
    ended. `on_end` is called with the outcome of each block once every block has one, perhaps before the copies' end.
    """

    def __init__(
        self,
        demotions: Demotions,
        fills: set[LentFill],
        keys: Sequence[OffloadKey],
        rows: list[int],
        on_end: Callable[[Sequence[BlockOutcome]], None],
    ) -> None:
        self._demotions = demotions
        self._control = control = demotions.control
        self._fills = fills
        self._keys = keys
        self._rows = rows
        self._on_end = on_end
        self._resets = control.resets
        self._named: Sequence[int] = range(len(keys))
        self._spare: set[int] = set()
        self._outcomes: list[BlockOutcome | None] = [None] * len(keys)
        self._open = len(keys)
        self._groups = group_runs(keys)
        blocks = control.group_blocks[JobKind.STORE]
        for group, count in self._groups:
            blocks[group] += count

    def begin(self, now: float) -> None:
        """Give the rows of new keys their keys; wait for the fills of others that are on their way."""
        control, keys, rows = self._control, self._keys, self._rows
        self._fills.add(self)
        if len(set(keys)) < len(keys) or not control.cpu.directory.keys().isdisjoint(keys):
            self._choose()
            keys, rows = [keys[index] for index in self._named], [rows[index] for index in self._named]
        control.cpu.fill_lent(rows, keys)
        if control.awaited.ages:
            control.awaited.on_change(keys)
        if self._spare:
            self._begin_spare(now)

    def _choose(self) -> None:
        """Name the blocks whose keys are new, the first of each key; the others are spare."""
        directory, first = self._control.cpu.directory, dict[OffloadKey, int]()
        for index, key in enumerate(self._keys):
            if key not in directory:
                first.setdefault(key, index)
        self._named = list(first.values())
        self._spare = set(range(len(self._keys))).difference(self._named)

    def _begin_spare(self, now: float) -> None:
        control, ready = self._control, list[int]()
        control.cpu.end_loan([self._rows[index] for index in self._spare])
        for index in sorted(self._spare):
            row = control.cpu.directory[self._keys[index]]
            if control.cpu.table.state[row] == READY:
                ready.append(row)
                self._complete(index, PRESENT)
            else:
                control.wait_for_fills(self, [(index, row)])
        if ready and not self._demotions.admits_all:
            self._demotions.on_use(ready[::-1], now)

    def rows_to_seal(self, errors: Sequence[int]) -> list[tuple[GroupIndex, list[int]]]:
        """(group, rows) that hold whole blocks which are still wanted, by the errno of each copy, 0 for success."""
        if self._resets != self._control.resets:
            return []
        whole, first, parts = not (self._spare or any(errors)), 0, []
        for group, count in self._groups:
            end = first + count
            rows = self._rows[first:end] if whole else self._wanted(range(first, end), errors)
            if rows:
                parts.append((group, rows))
            first = end
        return parts

    def _wanted(self, part: range, errors: Sequence[int]) -> list[int]:
        return [self._rows[index] for index in part if not errors[index] and index not in self._spare]

    def end(self, errors: Sequence[int], bytes_moved: int, now: float) -> None:
        """The copies have ended, with an errno for each block, 0 for success, and `rows_to_seal` are sealed."""
        control = self._control
        control.cpu_counters.store_bytes += bytes_moved
        rows, failures = self._rows, errors
        if self._spare:
            control.cpu.unpin([self._rows[index] for index in self._spare])
            rows = [self._rows[index] for index in self._named]
            failures = [errors[index] for index in self._named]
        copied = [STORED] * len(rows) if not any(failures) else [failed(one) if one else STORED for one in failures]
        ended = self._demotions.end_stores(rows, copied, self._resets, now)
        for index, outcome in zip(self._named, ended, strict=True):
            self._outcomes[index] = outcome
        self._close(len(ended))

    def on_fills(self, fills: Sequence[tuple[int, int]], success: bool, position: int, now: float) -> None:
        """The fills that blocks waited for have ended: these are there, or dropped, because their own rows are gone."""
        for index, row in fills:
            if self._outcomes[index] is not None:
                continue
            if not success:
                self._control.cpu_counters.drop(DropReason.NO_ROW)
                self._complete(index, dropped(DropReason.NO_ROW))
                continue
            self._complete(index, PRESENT)
            if not self._demotions.admits_all:
                self._demotions.on_use((row,), now)

    def stop(self, reason: DropReason) -> None:
        """Wait for the fills of others no more."""
        for index in self._spare:
            if self._outcomes[index] is None:
                self._control.cpu_counters.drop(reason)
                self._complete(index, dropped(reason))

    def _complete(self, index: int, outcome: BlockOutcome) -> None:
        self._outcomes[index] = outcome
        self._close(1)

    def _close(self, count: int) -> None:
        """So many blocks have their outcome."""
        self._open -= count
        if count and not self._open:
            self._fills.discard(self)
            self._on_end(list(filter(None, self._outcomes)))

"""Protections of sessions and how to turn each of them off; the simulator of engines finds the broken promise then."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from kvtier.client.core import EngineCore
from kvtier.control.flow.lent_fills import LentFill
from kvtier.control.tiers.slot_table import FILLING, READY
from kvtier.service import copying, pool
from kvtier.service.copying import Copying
from kvtier.service.kept_memory import KeptMemory
from kvtier.service.leasing import Leasing
from kvtier.service.namespaces import KeySpace
from kvtier.service.quotas import Quotas
from kvtier.service.row_table import RowTable
from kvtier.service.session import Session
from kvtier.service.weights import WeightsCheck
from kvtier.service.wire import Void
from kvtier.types.keys import OffloadKey, RequestId

Patch = pytest.MonkeyPatch


def leases_end_with_the_connection(patch: Patch) -> None:
    """Rows leased to an engine are free at once when its connection has ended."""
    lose = Session.lose

    def lost(session: Session, now: float) -> None:
        if not session.lost:
            session.leasing.drop_all(now)
        lose(session, now)

    patch.setattr(Session, "lose", lost)


def copies_end_with_the_connection(patch: Patch) -> None:
    """Rows of copies and lent rows are free at once when the engine's connection has ended."""
    lose = Session.lose

    def lost(session: Session, now: float) -> None:
        first = not session.lost
        lose(session, now)
        if first:
            session.copying.end_all(now)

    patch.setattr(Session, "lose", lost)


def a_reset_takes_leases_of_others(patch: Patch) -> None:
    """Rows leased to other engines are free at once when one has reset."""
    patch.setattr(Leasing, "on_reset", Leasing.drop_all)


def a_reset_leaves_leases(patch: Patch) -> None:
    """After a reset the same rows are found once more for their requests."""

    def on_reset(session: Session, own: bool, now: float) -> None:
        if not own and session.is_engine:
            session.add_items([Void()])
        session._weights.on_reset(session._loads_known)

    patch.setattr(Session, "on_reset", on_reset)


def loads_pin_nothing(patch: Patch) -> None:
    """The rows of a load have no pin of its own."""
    load = Copying.load

    def unpinned(self: Copying, item: Any, of: Any, now: float) -> bool:
        begun = load(self, item, of, now)
        copy = list(self._copies.values())[-1] if begun and self._copies else None
        if copy is not None and not copy.fills:
            self._pool.plane.control.cpu.unpin(copy.rows)
            if copy.load is not None:
                copy.load._rows = ()
        return begun

    patch.setattr(Copying, "load", unpinned)


def the_first_report_counts(patch: Patch) -> None:
    """A copy has ended when one worker has reported it."""

    def report(self: copying.Copy, worker: int, errors: Sequence[int]) -> bool:
        self.errors = [mine or theirs for mine, theirs in zip(self.errors, errors, strict=True)]
        self.left.clear()
        return True

    patch.setattr(copying.Copy, "report", report)


def rows_of_known_keys_are_free_at_once(patch: Patch) -> None:
    """A row whose key is elsewhere already is free while it is still copied into."""
    begin, end = LentFill.begin, LentFill.end

    def at_once(self: LentFill, now: float) -> None:
        begin(self, now)
        self._control.cpu.unpin([self._rows[index] for index in self._spare])

    def ended(self: LentFill, errors: Sequence[int], bytes_moved: int, now: float) -> None:
        self._control.cpu.pin([self._rows[index] for index in self._spare])
        end(self, errors, bytes_moved, now)

    patch.setattr(LentFill, "begin", at_once)
    patch.setattr(LentFill, "end", ended)


def namespaces_share_keys(patch: Patch) -> None:
    """The second namespace has the keys of the first one."""
    patch.setattr(KeySpace, "to_pool", lambda self, keys: keys)


def weights_are_not_asked_for(patch: Patch) -> None:
    """An engine is served whatever its weights are, and what it copies is stored."""
    patch.setattr(WeightsCheck, "is_open", property(lambda self: False))
    patch.setattr(Copying, "spoil_fills", lambda self: None)


def early_reports_are_forgotten(patch: Patch) -> None:
    """A report that comes before its job is named does not count."""
    patch.setattr(Copying, "_take_early", lambda self, copy, now: None)


def lookups_have_no_bound(patch: Patch) -> None:
    """Every row that is found is leased."""
    patch.setattr(Quotas, "found_room", lambda self, of_session: 1 << 30)


def reservations_have_no_bound(patch: Patch) -> None:
    """Reservations begin whatever the engine holds."""

    def begin(self: Leasing, now: float) -> bool:
        waiting = list(self._to_begin.values())
        self._to_begin.clear()
        for each in waiting:
            name = RequestId(f"{self._number}:{each.number}")
            keys: list[OffloadKey] = each.keys[: each.count]
            each.reservation = self._pool.plane.reserve(name, keys, now)
            self.reserving += each.count
        return bool(waiting)

    patch.setattr(Leasing, "_begin_waiting", begin)


def rows_of_the_dead_are_kept(patch: Patch) -> None:
    """Lent rows and copies stay when every process of an engine has exited."""
    patch.setattr(Copying, "end_all", lambda self, now: None)


def schedulers_wait_for_no_load(patch: Patch) -> None:
    """A scheduler connects again while loads of rows of the connection before are in flight."""
    patch.setattr(EngineCore, "is_drained", property(lambda self: True))


def engines_wait_for_no_worker(patch: Patch) -> None:
    """An engine that has connected again is served before its workers use the new rows."""
    send = Session._send_notes

    def notes(session: Session) -> None:
        session._resuming.clear()
        send(session)

    patch.setattr(Session, "_send_notes", notes)
    patch.setattr(Session, "_on_ready", lambda self, worker: None)
    on_worker = Session.on_worker

    def connected(session: Session, *greeting: Any) -> None:
        on_worker(session, *greeting)
        notes(session)

    patch.setattr(Session, "on_worker", connected)


def resets_end_with_the_connection(patch: Patch) -> None:
    """A reset that no stack process has made durable is not sent to the next one."""
    lose = EngineCore.lose

    def lost(core: EngineCore) -> None:
        lose(core)
        core._reset_due = False

    patch.setattr(EngineCore, "lose", lost)


def kept_rows_wait_for_no_worker(patch: Patch) -> None:
    """Rows that a worker of a killed stack process may copy are free for the next one."""
    join = KeptMemory.join

    def joined(kept: KeptMemory, *given: Any) -> Any:
        kept.former.clear()
        return join(kept, *given)

    patch.setattr(KeptMemory, "join", joined)


def kept_rows_of_other_weights(patch: Patch) -> None:
    """The next stack process finds what an engine of other weights had stored before it was held back."""
    patch.setattr(KeptMemory, "void", lambda kept: None)


def kept_rows_count_all(patch: Patch) -> None:
    """Rows that were being filled when a stack process was killed count as whole for the next one."""
    find = RowTable.find

    def found(table: RowTable) -> Any:
        table._states[table._states == FILLING] = READY
        return find(table)

    patch.setattr(RowTable, "find", found)
    patch.setattr(pool, "intact_rows", lambda rows, some, nbytes: [True] * len(some))


PROTECTIONS: dict[str, tuple[Callable[[Patch], None], str]] = {
    each.__name__: (each, says)
    for each, says in (
        (leases_end_with_the_connection, "is read as generation"),
        (copies_end_with_the_connection, "is filled as generation|is read as generation"),
        (a_reset_takes_leases_of_others, "is read as generation|not leased to its request"),
        (a_reset_leaves_leases, "a reset has made void|row.* as generation|not leased|pinned|answered"),
        (loads_pin_nothing, "is read as generation|have no pin"),
        (the_first_report_counts, "is filled as generation|is not its|not in flight"),
        (rows_of_known_keys_are_free_at_once, "is filled as generation"),
        (namespaces_share_keys, "bytes of another one"),
        (weights_are_not_asked_for, "other weights"),
        (early_reports_are_forgotten, "did not end|holds .* rows"),
        (lookups_have_no_bound, "rows are found"),
        (reservations_have_no_bound, "holds .* rows"),
        (rows_of_the_dead_are_kept, "counted|lent"),
        (schedulers_wait_for_no_load, "finds its rows gone"),
        (engines_wait_for_no_worker, "finds its rows gone|broke the protocol"),
        (resets_end_with_the_connection, "a reset has made void|before its reset is durable"),
        (kept_rows_wait_for_no_worker, "for a session of a process before|bytes of"),
        (kept_rows_of_other_weights, "of other weights"),
        (kept_rows_count_all, "bytes of|has refused"),
    )
}
"""How to turn a protection off by its name, and what the simulator says then (a regular expression)."""

RED_SEEDS: dict[str, tuple[int, ...]] = {
    "leases_end_with_the_connection": (90, 104, 146),
    "copies_end_with_the_connection": (1, 13, 18),
    "a_reset_takes_leases_of_others": (155, 241, 377),
    "a_reset_leaves_leases": (95, 220, 535),
    "loads_pin_nothing": (0, 9, 13),
    "the_first_report_counts": (0, 1, 2),
    "rows_of_known_keys_are_free_at_once": (0, 2, 4),
    "namespaces_share_keys": (5, 8, 9),
    "weights_are_not_asked_for": (69, 71, 186),
    "early_reports_are_forgotten": (0, 3, 4),
    "lookups_have_no_bound": (0, 4, 7),
    "reservations_have_no_bound": (4, 9, 20),
    "rows_of_the_dead_are_kept": (0, 1, 2),
    "schedulers_wait_for_no_load": (42, 82, 90),
    "engines_wait_for_no_worker": (11, 43, 61),
    "resets_end_with_the_connection": (534, 786, 792),
    "kept_rows_wait_for_no_worker": (307, 334, 497),
    "kept_rows_of_other_weights": (305,),
    "kept_rows_count_all": (141, 452, 668),
}
"""Seeds that were red without a protection. A change of what the simulator draws may make them green; then a run that
begins with them goes on with others and takes longer."""

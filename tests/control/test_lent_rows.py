"""Rows lent ahead: engines fill them before they state keys, nothing is twice, and every row comes back."""

from __future__ import annotations

import gc
import math
import random
import weakref
from collections.abc import Sequence
from functools import partial

import pytest
from support_control import ROW_BYTES, World, cpu_setup, fs_setup, key, key_number

from kvtier.control.flow.lent_fills import LentFill
from kvtier.control.settings import StackSettings
from kvtier.control.tiers.slot_table import FREE, LENT, READY
from kvtier.tier.contract import LookupResult
from kvtier.types.jobs import CANCELLED, LOADED, BlockOutcome, JobKind, failed
from kvtier.types.keys import JobId, OffloadKey

STORE = JobKind.STORE


class Lender:
    """An engine with rows lent to it. `copies` are under way, `results` those of fills that have ended."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.rows: dict[int, int] = {}
        self.number = 0
        self.copies: dict[int, tuple[LentFill, list[OffloadKey], list[int], int]] = {}
        self.results: dict[int, list[str]] = {}

    def borrow(self, count: int) -> int:
        rows, generations = self.world.plane.lend(count, self.world.now)
        self.rows |= dict(zip(rows, generations, strict=True))
        return len(rows)

    def fill(self, *numbers: int) -> int:
        """Begin a copy of these keys into rows that were lent, and state it."""
        world, keys, rows = self.world, [key(number) for number in numbers], list(self.rows)[: len(numbers)]
        self.number += 1
        for row in rows:
            del self.rows[row]
            world.watch.write(("row", row), JobId(-self.number))
        fill = world.plane.begin_fill(keys, rows, partial(self._on_end, self.number), world.now)
        self.copies[self.number] = fill, keys, rows, world.plane.control.epoch
        world.step()
        return self.number

    def _on_end(self, number: int, outcomes: Sequence[BlockOutcome]) -> None:
        assert number not in self.results, "a fill ended twice"
        self.results[number] = [outcome.status.value for outcome in outcomes]

    def end(self, number: int, *errors: int) -> None:
        """The workers have copied, or failed to copy some blocks."""
        world = self.world
        fill, keys, rows, epoch = self.copies.pop(number)
        world.watch.done(JobId(-number))
        world.bytes_at |= {("row", row): (each, epoch) for row, each in zip(rows, keys, strict=True)}
        of_each = errors or (0,) * len(rows)
        sealed = [row for _, part in fill.rows_to_seal(of_each) for row in part]
        assert {row for row, error in zip(rows, of_each, strict=True) if not error}.issuperset(sealed)
        fill.end(of_each, ROW_BYTES * len(sealed), world.now)
        world.step()

    def run_all(self) -> None:
        """End all copies, and all jobs of the tiers."""
        for number in list(self.copies):
            self.end(number)
        self.world.run_all()

    def give_back(self, count: int) -> None:
        rows = list(self.rows)[:count]
        for row in rows:
            del self.rows[row]
        self.world.plane.return_lent(rows)
        self.world.step()


def counts(world: World) -> tuple[int, int, int]:
    table = world.plane.control.cpu.table
    return table.counts[FREE], table.counts[LENT], table.counts[READY]


def test_rows_are_lent_filled_and_found():
    world = World(cpu_setup(8), [])
    lender = Lender(world)
    assert lender.borrow(4) == 4
    assert counts(world) == (4, 4, 0)
    job = lender.fill(1, 2, 3)
    assert world.plane.lookup([key(1)], world.now) != [LookupResult.HIT]
    lender.run_all()
    assert lender.results[job] == ["stored"] * 3
    assert world.plane.control.counters(0).store_bytes == 3 * ROW_BYTES
    assert world.plane.control.group_blocks[STORE] == [3]
    assert counts(world) == (4, 1, 3)
    loaded = world.load(1, 2, 3)
    world.run_all()
    assert world.statuses(loaded) == ["loaded"] * 3
    lender.give_back(1)
    assert counts(world) == (5, 0, 3)
    assert not world.wrong
    world.plane.check_integrity()


def test_a_store_into_lent_rows_that_has_ended_is_kept_nowhere():
    world = World(cpu_setup(8), [])
    lender = Lender(world)
    stores = []
    for number in range(3):
        lender.borrow(1)
        lender.fill(number)
        stores.append(weakref.ref(next(iter(world.plane._fills))))
        lender.run_all()
    gc.collect()
    assert [store() for store in stores] == [None] * 3


def test_a_key_that_is_there_or_on_its_way_gives_its_row_back_after_the_copy():
    world = World(cpu_setup(8), [])
    lender = Lender(world)
    world.store(1)
    world.run_all()
    lender.borrow(3)
    first = world.store(2)
    second = lender.fill(1, 2, 3)
    assert counts(world)[1] == 0
    lender.run_all()
    assert world.statuses(first) == ["stored"]
    assert lender.results[second] == ["present", "present", "stored"]
    assert counts(world) == (5, 0, 3)
    world.plane.check_integrity()


def test_what_a_tier_did_not_admit_is_offered_again_when_it_is_stored_once_more():
    world = World(cpu_setup(8), [fs_setup(16, admit="second_use")])
    lender = Lender(world)
    lender.borrow(4)
    lender.fill(1, 2)
    lender.run_all()
    assert world.plane.control.counters(1).stored == 0
    job = lender.fill(1, 2)
    lender.run_all()
    assert lender.results[job] == ["present"] * 2
    assert world.plane.control.counters(1).stored == 2
    owned = world.plane.control.lowers[0].owned
    assert [key_number(owned.table.keys[slot]) for slot in owned.policy.coldest()] == [2, 1], "leaf before root"
    world.check()


def test_where_the_other_fill_fails_the_block_is_dropped_and_no_row_is_lost():
    world = World(cpu_setup(8), [])
    lender = Lender(world)
    lender.borrow(1)
    first = world.store(2)
    (copy,) = world.under_way(0, STORE)
    second = lender.fill(2)
    world.end(copy, failed(5))
    assert world.statuses(first) == ["failed"]
    assert lender.results[second] == ["dropped"]
    assert counts(world) == (7, 0, 0), "its copy goes on"
    lender.run_all()
    assert counts(world) == (8, 0, 0)


def test_of_a_key_that_a_fill_names_twice_one_row_is_kept_and_the_other_free():
    world = World(cpu_setup(8), [])
    lender = Lender(world)
    lender.borrow(3)
    job = lender.fill(1, 2, 1)
    assert counts(world) == (5, 0, 0)
    lender.run_all()
    assert lender.results[job] == ["stored", "stored", "present"]
    assert counts(world) == (6, 0, 2)
    world.plane.check_integrity()


def test_blocks_that_a_worker_failed_to_copy_are_not_found_and_their_rows_are_free():
    world = World(cpu_setup(8), [])
    lender = Lender(world)
    lender.borrow(3)
    job = lender.fill(1, 2, 3)
    lender.end(job, 0, 5, 0)
    assert lender.results[job] == ["stored", "failed", "stored"]
    assert world.plane.locate([key(1), key(2), key(3)], world.now) == ["cpu", None, "cpu"]
    assert world.plane.control.counters(0).failed == 1
    assert counts(world) == (6, 0, 2)


def test_a_copy_that_a_reset_overtakes_keeps_its_rows_until_it_has_ended():
    world = World(cpu_setup(8), [])
    lender = Lender(world)
    world.store(9)
    world.run_all()
    lender.borrow(3)
    begun = world.store(8)
    job = lender.fill(1, 8, 9)
    world.plane.reset(world.now)
    world.step()
    assert job not in lender.results
    assert counts(world) == (4, 0, 0)
    lender.end(job)
    assert lender.results[job] == ["dropped", "dropped", "present"]
    assert counts(world) == (7, 0, 0)
    world.run_all()
    assert world.statuses(begun) == ["dropped"]
    assert counts(world) == (8, 0, 0)
    world.plane.check_integrity()


def test_a_stack_that_closes_waits_for_copies_that_have_begun_and_for_no_others_fill():
    world = World(cpu_setup(8), [])
    lender = Lender(world)
    lender.borrow(2)
    first, second = lender.fill(1), lender.fill(1)
    world.plane.close(world.now)
    world.step()
    assert lender.results == {second: ["dropped"]}
    assert not world.plane.idle
    lender.run_all()
    assert lender.results[first] == ["stored"]
    assert world.plane.idle


def test_lending_evicts_and_leaves_what_is_in_use():
    world = World(cpu_setup(4), [])
    world.store(1, 2, 3, 4)
    world.run_all()
    world.plane.reserve("r", [key(1)], world.now)
    world.step()
    lender = Lender(world)
    assert lender.borrow(8) == 3
    assert counts(world) == (0, 3, 1)
    assert world.plane.locate([key(1)], world.now) == ["cpu"]


@pytest.mark.parametrize("policy", ["lru", "arc", "reuse"])
def test_random_loans_never_lose_a_row_or_a_byte(policy: str, seed: int):
    rng = random.Random(seed)
    world = World(cpu_setup(16, policy), [fs_setup(32, 4)])
    lender = Lender(world)
    for _ in range(400):
        match rng.randrange(9):
            case 0:
                lender.borrow(rng.randint(1, 6))
            case 1 | 2 if lender.rows:
                count = rng.randint(1, len(lender.rows))
                lender.fill(*(rng.randrange(40) for _ in range(count)))
            case 3:
                lender.give_back(rng.randint(0, len(lender.rows)))
            case 4:
                world.load(*{rng.randrange(40) for _ in range(3)})
            case 5:
                world.store(*{rng.randrange(40) for _ in range(3)})
            case 6 if world.running:
                job = rng.choice(list(world.running))
                world.finish(job, "failed" if rng.random() < 0.1 else None)
            case 7 if lender.copies:
                number = rng.choice(list(lender.copies))
                count = len(lender.copies[number][1])
                lender.end(number, *(rng.choice((0, 0, 0, 5)) for _ in range(count)))
            case 8:
                world.pass_time(rng.random())
        if rng.random() < 0.01:
            world.plane.reset(world.now)
            world.step()
        world.plane.check_integrity()
    lender.run_all()
    lender.give_back(len(lender.rows))
    world.run_all()
    assert not world.wrong
    assert counts(world)[1] == 0
    assert set(lender.results) == set(range(1, lender.number + 1))
    assert set(world.jobs) == set(world.results)
    world.plane.check_integrity()


def test_a_loan_waits_for_rows_that_are_to_be_written_below_and_then_takes_them():
    world = World(cpu_setup(4), [fs_setup(32, inflight_blocks=2)], limits=StackSettings(gather_seconds=0.0))
    world.store(1, 2, 3, 4)
    world.run_tier(0)
    sent = sum(len(world.numbers(job)) for job in world.under_way(1, STORE))
    assert 0 < sent < 4, "the others wait for them"
    lender = Lender(world)
    assert lender.borrow(4) == 0
    patience = StackSettings().patience_seconds
    assert world.plane.next_deadline(world.now) == world.now + patience
    world.pass_time(patience / 2)
    assert lender.borrow(4) == 0
    world.pass_time(patience / 2)
    assert lender.borrow(4) == 4 - sent, "what is being written stays"
    world.run_all()
    assert lender.borrow(1) == 1
    assert not world.wrong
    world.plane.check_integrity()


def test_a_load_out_of_leased_rows_counts_for_the_tier_that_had_the_block():
    world = World(cpu_setup(4), [fs_setup(32)])
    for number in range(8):
        world.store(number)
        world.run_all()
    reservation = world.plane.reserve("r", [key(0), key(7)], world.now)
    world.step()
    world.run_all()
    rows = [reservation.rows[index] for index in range(2)]
    load = world.plane.begin_leased_load([key(0), key(7)], rows, reservation.brought, world.now)
    world.plane.end_request("r", world.now)
    assert [world.plane.control.cpu.table.pins[row] for row in rows] == [1, 1]
    assert world.plane.end_leased_load(load, [0, 0], 2 * ROW_BYTES) == [LOADED, LOADED]
    cpu, lower = world.plane.control.counters(0), world.plane.control.counters(1)
    assert (cpu.hits, lower.hits, cpu.loaded, cpu.load_bytes) == (1, 1, 2, 2 * ROW_BYTES)
    assert world.plane.control.group_blocks[JobKind.LOAD] == [2]
    assert [world.plane.control.cpu.table.pins[row] for row in rows] == [0, 0]
    world.plane.check_integrity()


def test_a_load_out_of_leased_rows_that_fails_or_that_a_reset_overtakes_is_none():
    world = World(cpu_setup(4), [])
    world.store(1, 2)
    world.run_all()
    cpu = world.plane.control.cpu
    rows = [cpu.directory[key(1)], cpu.directory[key(2)]]
    load = world.plane.begin_leased_load([key(1), key(2)], rows, {}, world.now)
    world.plane.reset(world.now)
    assert counts(world) == (2, 0, 0)
    assert world.plane.end_leased_load(load, [0, 5], 0) == [CANCELLED, failed(5)]
    assert counts(world) == (4, 0, 0)
    assert (world.plane.control.counters(0).hits, world.plane.control.counters(0).failed) == (0, 1)
    world.plane.check_integrity()


def test_a_reservation_waits_for_leases_outside_before_it_is_truncated():
    world = World(cpu_setup(4), [fs_setup(32)])
    for number in range(8):
        world.store(number)
        world.run_all()
    cpu = world.plane.control.cpu
    outside = [cpu.directory[key(number)] for number in (6, 7)]
    cpu.pin(outside)
    held = True
    world.plane.reservations.has_leases_outside = lambda: held
    reservation = world.plane.reserve("r", [key(0), key(1), key(2), key(3)], world.now)
    world.step()
    world.run_all()
    assert not reservation.served
    held = False
    cpu.unpin(outside)
    world.step()
    world.run_all()
    assert reservation.served
    assert reservation.hits() == [True] * 4


def test_a_loan_has_all_its_patience_after_nobody_waited():
    world = World(cpu_setup(4), [fs_setup(32, inflight_blocks=2)], limits=StackSettings(gather_seconds=0.0))
    world.store(1, 2, 3, 4)
    world.run_tier(0)
    lender = Lender(world)
    assert lender.borrow(4) == 0
    assert world.plane.lend_at == world.now + StackSettings().patience_seconds
    world.plane.end_lending()
    assert world.plane.lend_at == math.inf
    world.pass_time(0.9 * StackSettings().patience_seconds)
    assert lender.borrow(4) == 0
    assert world.plane.lend_at == world.now + StackSettings().patience_seconds

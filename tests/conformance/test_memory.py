"""The conformance suite over the tiers in memory, owned and shared; and the suite itself over tiers that lie."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import Phase, settings
from support_counts import some

from kvtier.testing import MemoryOptions, MemoryStorage, MemoryTier, SharedMemoryTier
from kvtier.testing.conformance import LoadStoreTests
from kvtier.testing.conformance.machine import run_machine
from kvtier.tier.checksum import checksum
from kvtier.tier.contract import LookupResult
from kvtier.types.jobs import CORRUPT, LOADED, MISSING, STORED, JobResult


class Stored:
    """One storage for each place, as if it were a disk."""

    def storage(self, place: Path) -> MemoryStorage:
        disks = vars(self).setdefault("disks", {})
        return disks.setdefault(place, MemoryStorage())

    def damage(self, place: Path) -> bool:
        for block in self.storage(place).blocks.values():
            block.payload[len(block.payload) // 2] ^= 1
        return True


class TestOwnedMemory(Stored, LoadStoreTests):
    survives_reopen = True

    def make(self, place: Path) -> MemoryTier:
        return MemoryTier(MemoryOptions(), self.storage(place))


class TestSharedMemory(Stored, LoadStoreTests):
    survives_reopen = True

    def make(self, place: Path) -> SharedMemoryTier:
        return SharedMemoryTier(MemoryOptions(), self.storage(place))


class TestForgetfulMemory(LoadStoreTests):
    """A tier that keeps nothing over its life is a tier too."""

    def make(self, place: Path) -> MemoryTier:
        return MemoryTier(MemoryOptions())


class Wrong(MemoryTier):
    """A tier that does everything right; each of those below gets one thing wrong."""


class ReadsAnyGeneration(Wrong):
    def _place(self, job, group, position):
        place, generation = super()._place(job, group, position)
        found = self.storage.blocks.get(place)
        return place, generation if found is None or job.kind == "store" else found.generation


class ChecksNoBytes(Wrong):
    def _move(self, job, kind, group, position):
        for place, block in list(self.storage.blocks.items()):
            self.storage.blocks[place] = block._replace(digest=checksum(memoryview(block.payload)))
        return super()._move(job, kind, group, position)


class ForgetsResets(Wrong):
    async def reset(self, epoch):
        self._opened()


class StampsWithTheEpochOfTheWrite(Wrong):
    def _move(self, job, kind, group, position):
        now = self.storage.epochs.get(self._context.namespace.digest(), 0)
        return super()._move(replace(job, epoch=now), kind, group, position)


class WritesIntoOtherRows(Wrong):
    def _move(self, job, kind, group, position):
        outcome = super()._move(job, kind, group, position)
        self._context.rows.view[-1, -1] += 1
        return outcome


class ForgetsOutcomes(Wrong):
    async def load(self, job):
        result = await super().load(job)
        return JobResult(result.job_id, tuple(group[:-1] for group in result.outcomes))


class IsNeverMissing(Wrong):
    def _move(self, job, kind, group, position):
        outcome = super()._move(job, kind, group, position)
        return LOADED if outcome in (MISSING, CORRUPT) else outcome


class LosesStores(Wrong):
    def _keep(self, place, block):
        return STORED if place[0] % 5 == 4 else super()._keep(place, block)


class LeavesATask(Wrong):
    async def open(self, context):
        self.forever = asyncio.create_task(asyncio.Event().wait())
        return await super().open(context)


class LeavesAFile(Wrong):
    async def open(self, context):
        self.fd = os.open("/", os.O_RDONLY)
        return await super().open(context)


class UsesTheDefaultExecutor(Wrong):
    async def load(self, job):
        await asyncio.to_thread(len, "")
        return await super().load(job)


class ReturnsEarlyWhenCancelled(Wrong):
    async def load(self, job):
        task = asyncio.create_task(super().load(job))
        self.tasks = [*getattr(self, "tasks", []), task]
        return await asyncio.shield(task)


class OpensTwice(Wrong):
    async def open(self, context):
        self._context, self._closed = None, False
        return await super().open(context)


def named(lie) -> str:
    return lie.__name__


LIES = {
    ReadsAnyGeneration: "test_a_slot_gives_only_its_own_key_and_generation",
    ChecksNoBytes: "test_damaged_blocks_are_noticed",
    ForgetsResets: "test_nothing_from_before_a_reset_is_found_after_it",
    StampsWithTheEpochOfTheWrite: "test_a_store_that_a_reset_overtakes_is_not_found_after_it",
    WritesIntoOtherRows: "test_a_store_changes_no_row_and_a_load_only_its_own",
    ForgetsOutcomes: "test_blocks_of_every_group_come_back_byte_for_byte",
    IsNeverMissing: "test_what_was_never_stored_is_no_hit_and_harms_no_neighbour",
    LosesStores: "test_blocks_of_every_group_come_back_byte_for_byte",
    LeavesATask: "test_many_lives_leave_nothing_behind",
    LeavesAFile: "test_many_lives_leave_nothing_behind",
    UsesTheDefaultExecutor: "test_blocks_of_every_group_come_back_byte_for_byte",
    ReturnsEarlyWhenCancelled: "test_rows_of_a_cancelled_load_are_written_no_more_once_it_has_returned",
    OpensTwice: "test_a_tier_is_opened_once",
}


@pytest.mark.parametrize("lie", some(LIES, 5), ids=named)
def test_the_suite_notices_a_tier_that(lie, tmp_path):
    class Suite(Stored, LoadStoreTests):
        survives_reopen = True

        def make(self, place):
            return lie(MemoryOptions(), self.storage(place))

    with pytest.raises((AssertionError, RuntimeError, pytest.fail.Exception)) as caught:
        getattr(Suite(), LIES[lie])(tmp_path)
    print(caught.value)


@pytest.mark.parametrize("lie", [ForgetsResets, LosesStores, IsNeverMissing, ForgetsOutcomes], ids=named)
def test_the_state_machine_notices_a_tier_that(lie, tmp_path):
    class Suite(Stored, LoadStoreTests):
        survives_reopen = True

        def make(self, place):
            return lie(MemoryOptions(), self.storage(place))

    limits = settings(max_examples=100, stateful_step_count=30, deadline=None, phases=[Phase.generate], database=None)
    with pytest.raises((AssertionError, BaseExceptionGroup)):
        run_machine(Suite(), tmp_path, limits)


def test_a_wrong_byte_names_its_owner(tmp_path):
    class Swaps(SharedMemoryTier):
        """Every lookup is honest and every load brings the block before it."""

        def _move(self, job, kind, group, position):
            outcome = super()._move(job, kind, group, position)
            if kind == "load" and position:
                rows = self._context.rows
                rows.view[group.rows[position]] = rows.view[group.rows[position - 1]]
            return outcome

        async def lookup(self, keys):
            return [LookupResult.HIT] * len(keys)

    class Suite(Stored, LoadStoreTests):
        def make(self, place):
            return Swaps(MemoryOptions(), self.storage(place))

    with pytest.raises(AssertionError, match=r"bytes are wrong, from byte 0 on they belong to key [0-9a-f]{72} gen"):
        Suite().test_blocks_of_every_group_come_back_byte_for_byte(tmp_path)

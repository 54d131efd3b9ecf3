"""Stores are planned once, and never from a GPU block that was reused."""

from __future__ import annotations

import pytest

from kvtier.errors import UsageError
from kvtier.planner import StoreMode, StorePlanner
from kvtier.types.jobs import CANCELLED, LATE, STORED, BlockOutcome, BlockStatus, DropReason, dropped, failed
from kvtier.types.keys import RequestId, make_key

A, B, C, D = (make_key(letter.encode(), 0) for letter in "abcd")
OTHER_GROUP = make_key(b"a", 1)
R1, R2 = RequestId("r1"), RequestId("r2")
PRESENT = BlockOutcome(BlockStatus.PRESENT)


def eager(factor: int = 1, **bounds) -> StorePlanner:
    return StorePlanner(StoreMode.EAGER, factor, **bounds)


def lazy(factor: int = 1, **bounds) -> StorePlanner:
    return StorePlanner(StoreMode.LAZY, factor, **bounds)


def keys_of(plan) -> list:
    return [key for group in plan.groups for key in group.keys]


def finish(planner, plan, outcome=STORED) -> None:
    planner.finish(plan, [[outcome] * len(group.keys) for group in plan.groups])


class TestEager:
    def test_full_blocks_are_planned_as_they_are_computed(self):
        planner = eager()
        assert planner.computed(R1, 0, [A, B], [10, 11]) == 2
        plan = planner.take(8)
        assert keys_of(plan) == [A, B]
        assert plan.groups[0].runs.gpu_blocks.tolist() == [10, 11]
        assert planner.take(8) is None

    def test_an_offloaded_block_takes_all_its_gpu_blocks(self):
        planner = eager(factor=3)
        planner.computed(R1, 0, [A, B], [5, 9, 7, 1, 2, 3])
        plan = planner.take(8)
        assert plan.groups[0].runs.covers_whole(2, 3).all()
        assert plan.groups[0].runs.gpu_blocks.tolist() == [5, 9, 7, 1, 2, 3]

    def test_half_an_offloaded_block_is_refused(self):
        with pytest.raises(UsageError, match="2 offloaded blocks need 6 GPU blocks, got 5"):
            eager(factor=3).computed(R1, 0, [A, B], [1, 2, 3, 4, 5])

    def test_a_block_with_a_hole_is_left_alone(self):
        planner = eager(factor=2)
        assert planner.computed(R1, 0, [A, B], [1, -1, 3, 4]) == 1
        assert keys_of(planner.take(8)) == [B]
        assert not planner.fenced(1)

    def test_a_plan_takes_no_more_than_asked_and_goes_on_in_order(self):
        planner = eager()
        planner.computed(R1, 0, [A, B, C], [1, 2, 3])
        assert planner.take(0) is None
        assert keys_of(planner.take(2)) == [A, B]
        assert (planner.num_queued, planner.num_in_flight) == (1, 2)
        assert keys_of(planner.take(2)) == [C]

    def test_the_groups_of_a_plan_are_in_order(self):
        planner = eager()
        planner.computed(R1, 1, [OTHER_GROUP], [1])
        planner.computed(R1, 0, [A], [2])
        plan = planner.take(8)
        assert [(group.group, group.keys) for group in plan.groups] == [(0, (A,)), (1, (OTHER_GROUP,))]
        assert plan.num_blocks == 2

    def test_eviction_from_the_pool_plans_nothing(self):
        planner = eager()
        planner.computed(R1, 0, [A], [1])
        finish(planner, planner.take(8), dropped(DropReason.NO_ROW))
        assert planner.about_to_evict([1]) == 0
        assert planner.take(8) is None


class TestLazy:
    def test_nothing_is_stored_until_the_pool_wants_a_block_back(self):
        planner = lazy()
        assert planner.computed(R1, 0, [A, B], [1, 2]) == 0
        assert planner.take(8) is None
        assert not planner.fenced(1)
        assert planner.about_to_evict([2]) == 1
        assert keys_of(planner.take(8)) == [B]

    def test_the_first_gpu_block_to_go_takes_its_whole_offloaded_block_along(self):
        planner = lazy(factor=2)
        planner.computed(R1, 0, [A], [1, 2])
        assert planner.about_to_evict([2, 1]) == 1
        assert planner.fenced(1)
        assert planner.fenced(2)
        assert planner.take(8).groups[0].runs.gpu_blocks.tolist() == [1, 2]

    def test_an_offloaded_block_that_lost_a_part_is_never_stored(self):
        planner = lazy(factor=2)
        planner.computed(R1, 0, [A], [1, 2])
        planner.reused([1])
        assert planner.about_to_evict([2]) == 0

    def test_unknown_and_empty_blocks_are_passed_over(self):
        planner = lazy()
        assert planner.about_to_evict([4, 5]) == 0
        assert planner.take(8) is None

    def test_a_stored_block_is_not_stored_again_while_it_stays(self):
        planner = lazy()
        planner.computed(R1, 0, [A, B], [1, 2])
        planner.about_to_evict([1, 2])
        plan = planner.take(8)
        planner.finish(plan, [[STORED, PRESENT]])
        assert planner.about_to_evict([1, 2]) == 0
        planner.reused([1])
        planner.computed(R2, 0, [A], [1])
        assert planner.about_to_evict([1]) == 1

    def test_a_reused_block_is_never_stored_under_its_old_key(self):
        planner = lazy()
        planner.computed(R1, 0, [A], [1])
        planner.reused([1])
        assert planner.about_to_evict([1]) == 0
        planner.computed(R2, 0, [B], [1])
        planner.about_to_evict([1])
        assert keys_of(planner.take(8)) == [B]


@pytest.mark.parametrize("mode", list(StoreMode))
class TestBothModes:
    @staticmethod
    def in_flight(mode, keys=(A,), blocks=(1,), factor=1):
        planner = StorePlanner(mode, factor)
        planner.computed(R1, 0, keys, blocks)
        planner.about_to_evict(blocks)
        return planner, planner.take(8)

    @pytest.mark.parametrize("outcome", [STORED, PRESENT, CANCELLED, LATE, failed(5), dropped(DropReason.NO_ROW), None])
    def test_the_fence_falls_when_the_store_ends_however_it_ends(self, mode, outcome):
        planner, plan = self.in_flight(mode, factor=2, blocks=(1, 2))
        assert planner.fenced(1)
        assert planner.fenced(2)
        planner.finish(plan, None if outcome is None else [[outcome]])
        assert (planner.num_fenced, planner.num_in_flight) == (0, 0)
        planner.reused([1, 2])

    def test_reusing_a_fenced_block_is_refused_and_changes_nothing(self, mode):
        planner, plan = self.in_flight(mode)
        with pytest.raises(UsageError, match="GPU block 1 was reused while a store still needs it"):
            planner.reused([7, 1])
        with pytest.raises(UsageError, match="GPU block 1 was reused while a store still needs it"):
            planner.computed(R2, 0, [C, B], [3, 1])
        assert planner.about_to_evict([3]) == 0
        assert planner.take(8) is None
        finish(planner, plan)
        assert planner.num_fenced == 0

    def test_two_blocks_with_one_hash_are_two_blocks(self, mode):
        planner, plan = self.in_flight(mode)
        planner.computed(R2, 0, [A], [2])
        assert planner.about_to_evict([2]) == 0
        assert planner.take(8) is None, "the key is on its way already"
        assert not planner.fenced(2)
        planner.reused([2])
        assert planner.fenced(1)
        finish(planner, plan)
        assert not planner.fenced(1)

    @pytest.mark.parametrize("outcome", [CANCELLED, failed(28), dropped(DropReason.BACKLOG)])
    def test_a_key_whose_store_was_dropped_may_be_planned_again(self, mode, outcome):
        planner, plan = self.in_flight(mode)
        planner.finish(plan, [[outcome]])
        assert planner.take(8) is None, "not on its own"
        planner.computed(R1, 0, [A], [1])
        planner.about_to_evict([1])
        assert keys_of(planner.take(8)) == [A]

    def test_each_block_of_a_plan_has_its_own_outcome(self, mode):
        planner, plan = self.in_flight(mode, (A, B), (1, 2))
        planner.finish(plan, [[dropped(DropReason.NO_ROW), STORED]])
        planner.computed(R1, 0, [A, B], [1, 2])
        planner.about_to_evict([1, 2])
        assert keys_of(planner.take(8)) == [A]

    def test_an_ended_request_leaves_its_stores_going(self, mode):
        planner = StorePlanner(mode)
        planner.computed(R1, 0, [A, B], [1, 2])
        planner.about_to_evict([1, 2])
        first = planner.take(1)
        planner.end_request(R1)
        planner.abort_request(R1)
        assert keys_of(planner.take(8)) == [B]
        assert keys_of(first) == [A]
        assert planner.fenced(1)

    def test_an_aborted_request_drops_what_is_queued_and_keeps_what_is_under_way(self, mode):
        planner = StorePlanner(mode)
        planner.computed(R1, 0, [A, B], [1, 2])
        planner.computed(R2, 0, [C], [3])
        planner.about_to_evict([1, 2, 3])
        first = planner.take(1)
        planner.abort_request(R1)
        assert not planner.fenced(2)
        assert planner.fenced(1)
        assert planner.about_to_evict([1, 2]) == 0
        assert keys_of(planner.take(8)) == [C]
        finish(planner, first)
        assert not planner.fenced(1)

    def test_after_a_reset_nothing_old_is_planned_and_stores_under_way_stay_fenced(self, mode):
        planner = StorePlanner(mode)
        planner.computed(R1, 0, [A, B], [1, 2])
        planner.about_to_evict([1, 2])
        first = planner.take(1)
        planner.reset()
        assert planner.about_to_evict([1, 2]) == 0
        assert planner.take(8) is None
        assert [planner.fenced(block) for block in (1, 2)] == [True, False]
        finish(planner, first)
        planner.computed(R2, 0, [A], [1])
        planner.about_to_evict([1])
        assert keys_of(planner.take(8)) == [A]

    def test_the_same_content_named_again_after_an_abort_is_no_reuse(self, mode):
        planner, plan = self.in_flight(mode)
        planner.abort_request(R1)
        planner.computed(R2, 0, [A], [1])
        assert planner.take(8) is None
        finish(planner, plan)
        assert planner.num_fenced == 0

    def test_the_fence_has_a_bound(self, mode):
        planner = StorePlanner(mode, factor=2, max_fenced_blocks=5)
        planner.computed(R1, 0, [A, B, C], [1, 2, 3, 4, 5, 6])
        planner.about_to_evict([1, 3, 5])
        assert (planner.num_fenced, planner.left_out) == (4, 1)
        assert keys_of(planner.take(8)) == [A, B]

    def test_a_bound_below_one_block_is_refused(self, mode):
        with pytest.raises(UsageError, match="fences 4 GPU blocks, max_fenced_blocks is 3"):
            StorePlanner(mode, factor=4, max_fenced_blocks=3)

    def test_new_content_in_a_part_of_a_block_ends_the_whole_block(self, mode):
        planner, plan = self.in_flight(mode, factor=2, blocks=(1, 2))
        planner.finish(plan, None)
        planner.computed(R2, 0, [B], [2, 3])
        planner.about_to_evict([1, 2])
        assert keys_of(planner.take(8)) == [B]
        assert not planner.fenced(1)

    def test_a_plan_is_finished_once(self, mode):
        planner, plan = self.in_flight(mode)
        with pytest.raises(UsageError, match="do not match"):
            planner.finish(plan, [[STORED, STORED]])
        assert planner.fenced(1)
        finish(planner, plan)
        with pytest.raises(UsageError, match="store plan 0 is not in flight"):
            finish(planner, plan)

    def test_a_gpu_block_cannot_hold_two_blocks(self, mode):
        planner = StorePlanner(mode)
        with pytest.raises(UsageError, match="GPU block 1 was named twice"):
            planner.computed(R1, 0, [A, B], [1, 1])
        assert planner.num_fenced == 0

"""A GPU block may belong to several offloaded blocks, and is fenced until the stores of all of them have ended."""

from __future__ import annotations

import pytest

from kvtier.errors import IntegrityError, UsageError
from kvtier.planner import StoreMode, StorePlanner
from kvtier.planner.stores import PlaceIndex
from kvtier.types.jobs import STORED
from kvtier.types.keys import RequestId, make_key

A, B, C = (make_key(letter.encode(), 0) for letter in "abc")
OTHER_GROUP = make_key(b"a", 1)
R1, R2 = RequestId("r1"), RequestId("r2")


def keys_of(plan) -> list:
    return [key for group in plan.groups for key in group.keys]


def finish(planner, plan) -> None:
    planner.finish(plan, [[STORED] * len(group.keys) for group in plan.groups])


@pytest.mark.parametrize("mode", list(StoreMode))
class TestSharedGPUBlocks:
    """Two requests begin alike and part inside an offloaded block; the engine gave both the same first GPU blocks."""

    @staticmethod
    def parted(mode, **bounds):
        """R1 has A in GPU blocks 1 2 3, R2 hit 1 2 in the engine's cache and has B in 1 2 4; both are queued."""
        planner = StorePlanner(mode, factor=3, **bounds)
        planner.computed(R1, 0, [A], [1, 2, 3])
        planner.computed(R2, 0, [B], [1, 2, 4])
        planner.about_to_evict([1])
        return planner

    def test_two_requests_that_part_inside_an_offloaded_block_are_both_stored(self, mode):
        planner = StorePlanner(mode, factor=3)
        queued = planner.computed(R1, 0, [A], [1, 2, 3]) + planner.about_to_evict([3])
        first = planner.take(8)
        assert (queued, keys_of(first)) == (1, [A])

        queued = planner.computed(R2, 0, [B], [1, 2, 4]) + planner.about_to_evict([1])
        second = planner.take(8)
        assert (queued, keys_of(second)) == (1, [B])
        assert second.groups[0].runs.gpu_blocks.tolist() == [1, 2, 4]
        assert (planner.num_fenced, planner.num_in_flight) == (4, 2)

        finish(planner, first)
        assert [planner.fenced(block) for block in (1, 2, 3, 4)] == [True, True, False, True]
        with pytest.raises(UsageError, match="GPU block 2 was reused while a store still needs it"):
            planner.reused([2])
        planner.reused([3])
        finish(planner, second)
        assert planner.num_fenced == 0
        planner.reused([1, 2, 4])

    def test_the_first_shared_gpu_block_to_go_takes_all_its_offloaded_blocks_along(self, mode):
        assert keys_of(self.parted(mode).take(8)) == [A, B]

    def test_a_gpu_block_of_one_takes_only_that_one_along(self, mode):
        planner = self.parted(mode)
        planner.finish(planner.take(8), None)
        planner.computed(R1, 0, [B], [1, 2, 4])
        planner.about_to_evict([4])
        assert keys_of(planner.take(8)) == [B]

    def test_reuse_of_a_shared_gpu_block_ends_all_its_offloaded_blocks(self, mode):
        planner = self.parted(mode)
        planner.finish(planner.take(8), None)
        planner.reused([2])
        assert planner.about_to_evict([1, 3, 4]) == 0
        assert not planner._holding

    def test_reuse_of_a_gpu_block_of_one_leaves_the_other(self, mode):
        planner = self.parted(mode)
        planner.finish(planner.take(8), None)
        planner.reused([3])
        planner.computed(R2, 0, [B], [1, 2, 4])
        planner.about_to_evict([1])
        assert keys_of(planner.take(8)) == [B]

    def test_aborting_one_request_leaves_the_others_store(self, mode):
        planner = self.parted(mode)
        planner.abort_request(R1)
        assert [planner.fenced(block) for block in (1, 2, 3, 4)] == [True, True, False, True]
        assert keys_of(planner.take(8)) == [B]

    def test_after_a_reset_only_stores_under_way_hold_the_fence(self, mode):
        planner = self.parted(mode)
        first = planner.take(1)
        planner.reset()
        assert [planner.fenced(block) for block in (1, 2, 3, 4)] == [True, True, True, False]
        assert planner.take(8) is None
        finish(planner, first)
        assert planner.num_fenced == 0

    def test_the_store_of_an_aborted_request_does_not_bar_a_request_that_shares_its_blocks(self, mode):
        planner = StorePlanner(mode, factor=3)
        planner.computed(R1, 0, [A], [1, 2, 3])
        planner.about_to_evict([1])
        first = planner.take(8)
        planner.abort_request(R1)
        planner.computed(R2, 0, [B], [1, 2, 4])
        planner.about_to_evict([4])
        finish(planner, first)
        assert planner.fenced(1)
        assert keys_of(planner.take(8)) == [B]

    def test_shared_gpu_blocks_count_once_against_the_bound(self, mode):
        planner = self.parted(mode, max_fenced_blocks=4)
        assert (planner.num_fenced, planner.num_queued, planner.left_out) == (4, 2, 0)
        planner.computed(R1, 0, [C], [1, 2, 5])
        planner.about_to_evict([5])
        assert (planner.num_fenced, planner.num_queued, planner.left_out) == (4, 2, 1)

    @pytest.mark.parametrize(
        ("key", "group", "gpu_blocks"),
        [
            pytest.param(B, 0, [1, 2, 3], id="another key in the same place"),
            pytest.param(B, 0, [4, 5, 3], id="the last GPU block"),
            pytest.param(B, 0, [2, 4, 5], id="another sub-block"),
            pytest.param(B, 0, [1, 3, 2], id="the same head and another sub-block"),
            pytest.param(A, 0, [2, 1, 3], id="the same key in another order"),
            pytest.param(OTHER_GROUP, 1, [1, 2, 4], id="another group"),
        ],
    )
    def test_a_fenced_gpu_block_that_cannot_be_shared_was_reused(self, mode, key, group, gpu_blocks):
        planner = StorePlanner(mode, factor=3)
        planner.computed(R1, 0, [A], [1, 2, 3])
        planner.about_to_evict([1])
        plan = planner.take(8)
        with pytest.raises(UsageError, match="was reused while a store still needs it"):
            planner.computed(R2, group, [C, key], [7, 8, 9, *gpu_blocks])
        assert planner.about_to_evict([7, 4, 5]) == 0
        assert (planner.num_fenced, planner.num_queued) == (3, 0)
        finish(planner, plan)
        assert planner.num_fenced == 0
        planner.computed(R2, group, [key], gpu_blocks)
        planner.about_to_evict([1, 2, 3])
        assert keys_of(planner.take(8)) == [key], "unfenced, it is new content and the old block is forgotten"

    def test_a_prefix_cache_may_mix_copies_of_a_sub_block(self, mode):
        """GPU block 6 is a copy of 1, and the engine gave R2 that one: 2 is shared, what comes before it is not."""
        planner = StorePlanner(mode, factor=3)
        planner.computed(R1, 0, [A], [1, 2, 3])
        planner.about_to_evict([1])
        first = planner.take(8)
        planner.computed(R2, 0, [B], [6, 2, 4])
        assert planner.computed(R2, 0, [A], [6, 2, 3]) == 0, "A is on its way already"
        planner.about_to_evict([6])
        assert keys_of(planner.take(8)) == [B]
        finish(planner, first)
        assert [planner.fenced(block) for block in (1, 2, 3, 6, 4)] == [False, True, False, True, True]


class TestPlaceIndex:
    def test_only_the_key_that_was_fenced_takes_the_fence_down(self):
        fence = PlaceIndex()
        fence.add([1, 2], A)
        with pytest.raises(IntegrityError, match="what was removed is not at 1"):
            fence.remove([1], B)
        with pytest.raises(IntegrityError, match="added twice at 2"):
            fence.add([2], A)
        fence.remove([1, 2], A)
        assert len(fence) == 0
        assert 1 not in fence

    def test_a_block_that_two_stores_need_is_fenced_until_both_have_ended(self):
        fence = PlaceIndex()
        fence.add([1, 2], A)
        fence.add([1, 3], B)
        assert len(fence) == 3
        assert [list(fence.at(block)) for block in (1, 2, 3, 4)] == [[A, B], [A], [B], []]
        fence.remove([1, 2], A)
        assert [block in fence for block in (1, 2, 3)] == [True, False, True]
        fence.remove([1, 3], B)
        assert len(fence) == 0

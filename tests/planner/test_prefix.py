"""How much of a prompt is a hit, and what of it has to be loaded."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support_counts import examples

from kvtier.errors import UsageError
from kvtier.planner import blocks_to_load, hit_limit, plan_load, prefix_unit, usable_prefix
from kvtier.types.geometry import GroupKind, GroupLayout, KVLayout, TensorRef
from kvtier.types.keys import make_key

REFS = (TensorRef(0, 64),)
FULL = GroupLayout(REFS, 16)


def sliding(window_tokens: int, block_size: int = 16) -> GroupLayout:
    return GroupLayout(REFS, block_size, GroupKind.SLIDING_WINDOW, window_tokens)


def mamba(block_size: int = 16) -> GroupLayout:
    return GroupLayout(REFS, block_size, GroupKind.MAMBA)


def flags(text: str) -> list[bool]:
    """`xx.x`: blocks 0, 1 and 3 are there, block 2 is not."""
    return [mark == "x" for mark in text]


class TestHitLimit:
    def test_a_prompt_of_exactly_n_blocks_hits_n_minus_1(self):
        assert hit_limit(KVLayout((FULL,)), 64) == 48

    def test_one_more_token_frees_the_last_block(self):
        assert hit_limit(KVLayout((FULL,)), 65) == 64

    def test_short_and_empty_prompts_hit_nothing(self):
        assert [hit_limit(KVLayout((FULL,)), tokens) for tokens in (0, 1, 16)] == [0, 0, 0]

    def test_lengths_fit_every_group(self):
        layout = KVLayout((FULL, sliding(64, 24)), block_size_factor=2)
        assert prefix_unit(layout) == 96
        assert hit_limit(layout, 300) == 288
        assert hit_limit(layout, 288) == 192


class TestUsablePrefix:
    def test_full_attention_stops_at_the_first_gap(self):
        assert usable_prefix(KVLayout((FULL,)), [flags("xx.xx")], 1000) == 32

    def test_a_sliding_window_needs_only_its_last_window(self):
        layout = KVLayout((sliding(32),))
        assert usable_prefix(layout, [flags("....xx")], 97) == 96
        assert usable_prefix(layout, [flags("xx..x.")], 97) == 32
        assert usable_prefix(layout, [flags(".x.x.x")], 97) == 0

    def test_a_window_that_begins_inside_a_block_needs_that_block(self):
        layout = KVLayout((sliding(17),))
        assert usable_prefix(layout, [flags("...x")], 65) == 0
        assert usable_prefix(layout, [flags("..xx")], 65) == 64

    def test_a_window_longer_than_the_prefix_needs_all_of_it(self):
        assert usable_prefix(KVLayout((sliding(1000),)), [flags("xxx.")], 65) == 48

    def test_mamba_needs_the_state_at_exactly_that_length(self):
        layout = KVLayout((mamba(),))
        assert usable_prefix(layout, [flags("..x.")], 65) == 48
        assert usable_prefix(layout, [flags("....")], 65) == 0

    def test_the_groups_of_a_hybrid_model_must_agree(self):
        layout = KVLayout((FULL, sliding(16), mamba()))
        assert usable_prefix(layout, [flags("xxxxx"), flags(".x.x."), flags("xx..x")], 1000) == 32

    def test_the_whole_prompt_is_never_a_hit(self):
        assert usable_prefix(KVLayout((FULL,)), [flags("xxxx")], 64) == 48

    def test_presence_may_be_a_function_and_is_not_asked_beyond_the_prompt(self):
        asked = []
        assert usable_prefix(KVLayout((FULL,)), [lambda block: asked.append(block) or block < 3], 100) == 48
        assert asked == [0, 1, 2, 3]

    def test_every_group_must_be_answered_for(self):
        with pytest.raises(UsageError, match="2 groups, presence was given for 1"):
            usable_prefix(KVLayout((FULL, FULL)), [flags("x")], 100)


class TestBlocksToLoad:
    def test_full_attention_loads_everything_the_gpu_lacks(self):
        layout = KVLayout((FULL,), block_size_factor=4)
        assert blocks_to_load(layout, 0, 128) == range(8)
        assert blocks_to_load(layout, 0, 128, computed_tokens=48) == range(3, 8)
        assert not blocks_to_load(layout, 0, 128, computed_tokens=128)
        assert not blocks_to_load(layout, 0, 128, computed_tokens=160)

    def test_a_sliding_window_loads_no_block_before_the_window(self):
        layout = KVLayout((sliding(32),), block_size_factor=4)
        assert blocks_to_load(layout, 0, 128) == range(6, 8)
        assert blocks_to_load(layout, 0, 128, computed_tokens=112) == range(7, 8)

    def test_mamba_loads_one_state(self):
        layout = KVLayout((mamba(),), block_size_factor=4)
        assert blocks_to_load(layout, 0, 128) == range(7, 8)
        assert blocks_to_load(layout, 0, 128, computed_tokens=64) == range(7, 8)
        assert not blocks_to_load(layout, 0, 128, computed_tokens=128)

    def test_a_length_between_blocks_is_refused(self):
        with pytest.raises(UsageError, match="no multiple of the prefix unit of 64"):
            blocks_to_load(KVLayout((FULL,), block_size_factor=4), 0, 80)


class TestPlanLoad:
    LAYOUT = KVLayout((FULL, sliding(32), mamba()), block_size_factor=4)

    def test_only_the_rest_of_an_unaligned_head_is_loaded(self):
        tables = [list(range(100, 108)), [-1] * 6 + [206, 207], [-1] * 7 + [307]]
        full, window, state = plan_load(self.LAYOUT, 128, 32, tables)
        assert full.positions.tolist() == [0, 1]
        assert list(zip(*map(np.ndarray.tolist, full.runs.pages()), strict=True)) == [
            *((0, sub, 100 + sub) for sub in (2, 3)),
            *((1, sub, 104 + sub) for sub in range(4)),
        ]
        assert (window.positions.tolist(), window.runs.firsts.tolist(), window.runs.counts.tolist()) == ([1], [2], [2])
        assert (state.positions.tolist(), state.runs.firsts.tolist(), state.runs.counts.tolist()) == ([1], [3], [1])
        assert state.runs.gpu_blocks.tolist() == [307]

    def test_a_share_names_the_keys_of_its_positions(self):
        keys = [make_key(bytes([i]), 1) for i in range(3)]
        (window,) = plan_load(KVLayout((sliding(32),), block_size_factor=4), 192, 0, [[-1] * 10 + [5, 6]])
        transfer = window.transfer(keys)
        assert transfer.keys == (keys[2],)
        assert transfer.group == 0
        assert transfer.runs is window.runs

    def test_groups_with_nothing_to_load_are_left_out(self):
        assert plan_load(self.LAYOUT, 128, 128, [[], [], []]) == ()
        assert plan_load(self.LAYOUT, 0, 0, [[], [], []]) == ()

    @pytest.mark.parametrize("table", [[1, 2, 3], [1, 2, -1, 4]])
    def test_a_table_without_room_for_the_load_is_refused(self, table):
        with pytest.raises(UsageError, match="group 0 needs GPU blocks at 0 to 3"):
            plan_load(KVLayout((FULL,)), 64, 0, [table])


groups = st.one_of(
    st.builds(lambda size: GroupLayout(REFS, size), st.integers(1, 6)),
    st.builds(sliding, st.integers(1, 40), st.integers(1, 6)),
    st.builds(mamba, st.integers(1, 6)),
)
layouts = st.builds(
    lambda kinds, factor: KVLayout(tuple(kinds), block_size_factor=factor),
    st.lists(groups, min_size=1, max_size=4),
    st.integers(1, 3),
)


def needed_tokens(group: GroupLayout, length: int) -> range:
    """Naively: the tokens before `length` whose keys, values or states computing token `length` reads."""
    if group.kind is GroupKind.FULL:
        return range(length)
    if group.kind is GroupKind.MAMBA:
        return range(length - 1, length)
    return range(max(0, length - group.window_tokens), length)


def valid(layout: KVLayout, present: list[list[bool]], length: int) -> bool:
    for group, there in zip(layout.groups, present, strict=True):
        tokens = group.block_size * layout.block_size_factor
        if length % tokens:
            return False
        if any(t // tokens >= len(there) or not there[t // tokens] for t in needed_tokens(group, length)):
            return False
    return True


@examples(600)
@given(layouts, st.data(), st.integers(0, 150))
def test_the_usable_prefix_is_the_longest_valid_length(layout, data, num_tokens):
    present = [
        data.draw(st.lists(st.sampled_from([True, True, True, False]), max_size=num_tokens + 1)) for _ in layout.groups
    ]
    longest = max((n for n in range(1, num_tokens) if valid(layout, present, n)), default=0)
    assert usable_prefix(layout, present, num_tokens) == longest
    asked = [lambda block, there=there: block < len(there) and there[block] for there in present]
    assert usable_prefix(layout, asked, num_tokens) == longest


@examples(400)
@given(layouts, st.integers(0, 4), st.integers(0, 300))
def test_a_load_brings_exactly_the_needed_gpu_blocks_that_are_not_there(layout, units, computed_tokens):
    length = units * prefix_unit(layout)
    assert length % math.lcm(*(group.block_size for group in layout.groups)) == 0
    factor = layout.block_size_factor
    expected, tables = {}, []
    for index, group in enumerate(layout.groups):
        needed = {t // group.block_size for t in needed_tokens(group, length)} if length else set()
        held = computed_tokens // group.block_size
        expected |= {(index, block): 1000 * index + block for block in needed if block >= held}
        tables.append([1000 * index + block if block in needed else -1 for block in range(length // group.block_size)])
    loaded = {}
    for load in plan_load(layout, length, computed_tokens, tables):
        positions, subs, ids = load.runs.pages()
        assert sorted(set(positions.tolist())) == list(range(len(load.positions)))
        for position, sub, gpu_block in zip(positions.tolist(), subs.tolist(), ids.tolist(), strict=True):
            loaded[load.group, int(load.positions[position]) * factor + sub] = gpu_block
    assert loaded == expected

"""What `policy: reuse` promises of blocks: every block in order once, no pinned block, prefixes kept whole."""

from __future__ import annotations

import random

import pytest
from support_reuse import Tier, chat, prompt

from kvtier.errors import IntegrityError
from kvtier.policy.reuse.lru_guard import LRUGuard
from kvtier.policy.reuse.pending_blocks import PendingBlocks
from kvtier.policy.reuse.prediction.classes import LEFT
from kvtier.policy.reuse.prediction.segments import NONE, Segments
from kvtier.types.keys import OffloadKey, make_key


def test_the_end_of_the_oldest_prompt_goes_first() -> None:
    tier = Tier(6)
    old, new = chat(0, 3), chat(1, 3)
    tier.serve(old, 0.0)
    tier.serve(new, 100.0)
    tier.begin(chat(2, 1), 101.0)
    tier.store(chat(2, 1))
    assert old[2] not in tier.slots
    assert old[1] in tier.slots
    tier.check()


def test_a_segment_is_split_where_a_prompt_leaves_it() -> None:
    tier = Tier(8)
    tier.serve(prompt(1, 2, 3, 4), 0.0)
    assert tier.serve(prompt(1, 2, 8, 9), 10.0) == 2
    tier.check()
    assert tier.serve(prompt(1, 2, 3, 4), 20.0) == 4
    lengths = [length for length in tier.policy._tree.segments.length if length]
    assert sorted(lengths) == [2, 2, 2]
    tier.free_slots(tier.policy.evict(3, tier.pins) or [])
    assert set(prompt(1, 2, 3)) <= set(tier.slots)


def test_a_prompt_that_leaves_the_last_block_behind_counts_as_one_that_came_back() -> None:
    """A last block that was not full never comes back, and is of another class than the blocks before it."""
    tier = Tier(440)
    for session in range(60):
        for turn in range(2):
            tier.serve(prompt(session, 0, 1, *([2, 3] if turn else []), -1 - turn), 4.0 * session + 2.0 * turn)
    segments = tier.policy._tree.segments
    left = [seg for seg in range(segments.used) if segments.length[seg] and segments.kind[seg] == LEFT]
    assert [segments.length[seg] for seg in left] == [1] * 60
    assert [segments.uses[seg] for seg in left] == [1] * 60
    assert sum(tier.model.tables.ended) > 50  # every session came back once, less what has faded


def test_blocks_that_arrive_after_their_request_ended_belong_to_its_prompt() -> None:
    """As those of a lower tier do, which gets them when the engine is done."""
    tier = Tier(8)
    tier.begin(chat(0, 4), 0.0)
    tier.end(50)
    tier.store(chat(0, 4))
    assert tier.serve(chat(0, 6), 60.0) == 4
    assert sorted(length for length in tier.policy._tree.segments.length if length) == [2, 4]
    tier.check()


def test_what_a_new_block_hangs_on_does_not_go_for_it() -> None:
    tier = Tier(4)
    tier.serve(chat(0, 2), 0.0)
    tier.serve(chat(1, 2), 50.0)
    tier.begin(chat(0, 4), 60.0)
    tier.store(chat(0, 4))
    assert set(chat(0, 4)) == set(tier.slots)


def test_a_block_of_output_does_not_take_the_place_of_what_it_hangs_on() -> None:
    tier = Tier(4)
    tier.serve(chat(0, 2), 0.0)
    tier.begin(chat(1, 2), 50.0)
    tier.store(chat(1, 2))
    for blocks in (3, 4):
        tier.extend(chat(1, blocks)[-1:])
        tier.store(chat(1, blocks)[-1:])
    assert set(chat(1, 4)) == set(tier.slots)
    tier.check()


@pytest.mark.parametrize("announced", [True, False])
def test_blocks_of_the_output_are_known_by_the_next_prompt(announced: bool) -> None:
    """Those that nobody announced are known once a prompt has them."""
    tier = Tier(12)
    tier.begin(chat(0, 3), 0.0)
    tier.store(chat(0, 3))
    for blocks in (4, 5):
        if announced:
            tier.extend(chat(0, blocks)[-1:])
        tier.store(chat(0, blocks)[-1:])
        tier.check()
    tier.end(30)
    segments = tier.policy._tree.segments
    lengths = sorted(length for length in segments.length if length)
    assert lengths == ([5] if announced else [1, 1, 3])
    assert tier.serve(chat(0, 7), 60.0) == 5
    tier.check()
    assert tier.serve(chat(0, 7), 120.0) == 7
    tier.check()
    used = [(segments.length[seg], segments.uses[seg]) for seg in range(segments.used) if segments.length[seg]]
    assert sorted(used) == ([(2, 2), (5, 3)] if announced else [(2, 2), (2, 3), (3, 3)])


def test_output_below_a_prompt_that_others_share_is_a_segment_of_its_own() -> None:
    tier = Tier(12)
    tier.serve(chat(0, 3), 0.0)
    tier.begin(chat(0, 3), 10.0)
    for blocks in (4, 5):
        tier.extend(chat(0, blocks)[-1:])
        tier.store(chat(0, blocks)[-1:])
    assert sorted(length for length in tier.policy._tree.segments.length if length) == [2, 3]
    tier.begin(chat(0, 3), 20.0)
    tier.extend(chat(0, 4)[-1:])  # it computes the same: what is known stays as it is
    tier.extend(chat(0, 5)[-1:])
    assert sorted(length for length in tier.policy._tree.segments.length if length) == [2, 3]
    tier.check()


def test_eviction_takes_all_or_nothing_and_no_pinned_block() -> None:
    tier = Tier(4)
    tier.serve(chat(0, 4), 0.0)
    leaf = tier.slots[chat(0, 4)[3]]
    tier.pins[leaf] = 1
    assert tier.policy.evict(4, tier.pins) is None
    tier.check()
    assert leaf not in (tier.policy.evict(3, tier.pins) or [leaf])


def test_a_leaf_whose_end_is_pinned_is_put_aside_and_counts_again_later() -> None:
    tier = Tier(12)
    oldest, older = chat(0, 4), chat(1, 4)
    for session in range(3):
        tier.serve(chat(session, 4), 100.0 * session)
    end = tier.slots[oldest[-1]]
    tier.pins[end] = 1
    for gone in (older[3], older[2]):
        assert tier.policy.evict(1, tier.pins) == [tier.slots[gone]]
        tier.free_slots([tier.slots[gone]])
        tier.check()
    tier.pins[end] = 0
    assert tier.policy.evict(2, tier.pins) == [end, tier.slots[oldest[-2]]]


def test_a_slot_is_inserted_and_removed_once() -> None:
    tier = Tier(4)
    tier.serve(chat(0, 2), 0.0)
    slot = tier.slots[chat(0, 2)[0]]
    with pytest.raises(IntegrityError):
        tier.policy.insert([slot])
    tier.policy.remove([slot])
    with pytest.raises(IntegrityError):
        tier.policy.remove([slot])


def test_what_a_tier_recovered_goes_first_and_is_known_once_used() -> None:
    tier = Tier(6)
    for slot, key in enumerate(chat(0, 4)):
        tier.keys[slot], tier.slots[key] = key, slot
        tier.free.remove(slot)
    tier.policy.recover([3, 2, 1, 0])
    tier.check()
    assert tier.begin(chat(0, 2), 5.0) == 2
    tier.check()
    tier.serve(chat(1, 3), 6.0)
    assert chat(0, 4)[3] not in tier.slots
    assert set(chat(0, 2)) <= set(tier.slots)


@pytest.mark.parametrize("num_slots", [1, 3, 40, 150])
def test_every_block_stays_in_order_whatever_happens(num_slots: int, seed: int) -> None:
    rng = random.Random(seed)
    tier, time = Tier(num_slots), 0.0
    for step in range(600):
        time += rng.choice((0.0, 0.5, 30.0, -5.0, 400.0))
        keys = prompt(rng.randrange(3), *(rng.randrange(2) for _ in range(rng.randrange(9))), step % 7)
        tier.begin(keys, time)
        for slot in rng.sample(range(num_slots), num_slots // 8):
            tier.pins[slot] = tier.keys[slot] is not None
        if rng.random() < 0.8:
            tier.store(keys[: rng.randrange(1, len(keys) + 1)], bypass=rng.random() < 0.5)
        if rng.random() < 0.1:
            tier.store([make_key(rng.randbytes(8), 0)])
        if rng.random() < 0.5:
            output = [make_key(keys[-1] + bytes([block]), 0) for block in range(rng.randrange(1, 4))]
            tier.extend(rng.choice((output, output[1:] or output, keys[-1:])))
            tier.store(output[: rng.randrange(4)], bypass=rng.random() < 0.5)
        tier.pins = bytearray(num_slots)
        tier.end(rng.choice((None, 5, 500)))
        gone = [slot for slot in tier.slots.values() if rng.random() < 0.02]
        rng.choice((tier.policy.remove, tier.policy.forget))(gone)
        tier.free_slots(gone)
        tier.policy.touch(list(tier.slots.values())[:2])
        tier.check()
    known = tier.policy._pending
    assert len(known) <= known.kept_max + num_slots


@pytest.mark.parametrize("num_slots", [40, 200])
def test_blocks_that_come_late_and_in_any_order_stay_at_their_places(num_slots: int, seed: int) -> None:
    """A lower tier gets them in small jobs, long after their request, when segments have had the ids of others."""
    rng = random.Random(seed)
    tier, time, waiting = Tier(num_slots), 0.0, list[list[OffloadKey]]()
    for step in range(600):
        time += rng.expovariate(0.5)
        keys = chat(rng.randrange(150), rng.randrange(1, 30))
        if rng.random() < 0.3:
            keys[rng.randrange(len(keys)) :] = chat(1000 + step, rng.randrange(1, 8))
        tier.begin(keys, time)
        tier.end(rng.choice((None, 50)))
        waiting += [keys[start : start + 7] for start in range(0, len(keys), 7)]
        while len(waiting) > 100:
            tier.store(waiting.pop(rng.randrange(len(waiting)))[:num_slots], bypass=rng.random() < 0.5)
        if rng.random() < 0.3:
            tier.store([make_key(rng.randbytes(8), 0)])
        if not step % 10:
            tier.check()
    known = tier.policy._pending
    assert len(known) <= known.kept_max + num_slots


def test_more_segments_than_there_are_ids_for_keep_what_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where each block is a segment, no tier is filled for good by those that had the ids first.

    In the model's order; the guard follows LRU's, which hits nothing here, while it cannot compare them.
    """
    monkeypatch.setattr(LRUGuard, "on_request", lambda guard, missed: False)
    tier, hits = Tier(1000), 0
    for number in range(4000):
        tier.begin(chat(number, 1), 10.0 * number)
        tier.store(chat(number, 1))
        tier.end(50)
        if number >= 600:
            hits += tier.begin(chat(number - 600, 1), 10.0 * number + 5)
            tier.store(chat(number - 600, 1))
            tier.end(50)
        if not number % 100:
            tier.check()
    assert hits > 3000


def test_a_block_that_is_used_while_there_is_no_id_left_does_not_go_as_one_of_old() -> None:
    tier = Tier(1000)
    for number in range(1000):
        tier.serve(chat(number, 1), 0.01 * number)
    assert tier.policy._tree.num_untracked > 100
    assert tier.begin(chat(0, 1), 11.0) == 1
    for number in range(1000, 1050):
        tier.serve(chat(number, 1), 0.01 * number + 2.0)
    tier.check()
    assert chat(0, 1)[0] in tier.slots
    assert chat(1, 1)[0] not in tier.slots


def test_unannounced_blocks_in_more_segments_than_there_are_ids_for_go_by_age() -> None:
    tier = Tier(1000)
    for number in range(3000):
        tier.model.advance(10.0 * number)
        tier.store(chat(number, 1), bypass=False)
        if not number % 100:
            tier.check()
    assert sum(chat(number, 1)[0] in tier.slots for number in range(2000, 3000)) > 700


def test_a_prompt_longer_than_the_tier_is_known_when_it_comes() -> None:
    tier = Tier(3000)
    for turn in range(3):
        for session in range(3):
            tier.begin(chat(session, 9000 + turn), 10.0 * turn)
            tier.store(chat(session, 3000), bypass=False)
            tier.check()
            assert max(tier.policy._tree.segments.held) == 3000


def test_a_prompt_that_is_stored_from_its_end_on_loses_its_end_first() -> None:
    """So it comes from rows that are evicted leaf first."""
    tier = Tier(12)
    tier.begin(chat(0, 12), 0.0)
    for start in (8, 4, 0):
        tier.store(chat(0, 12)[start : start + 4])
    tier.check()
    tier.begin(chat(1, 3), 1.0)
    tier.store(chat(1, 3), bypass=False)
    assert set(chat(0, 9)) <= set(tier.slots)


@pytest.mark.parametrize("held", [0, 5])
def test_a_prompt_that_is_gone_is_known_by_one_that_leaves_only_its_last_block(held: int) -> None:
    """That block was not full, or its tokens became others: so are most prompts of chats left by their next turn."""
    tier = Tier(64)
    tier.begin(chat(0, 20), 0.0)
    tier.store(chat(0, held))
    assert tier.begin([*chat(0, 19), *prompt("next turn", 6)], 90.0) == held
    known = tier.policy._tree.segments
    seg = known.find(chat(0, 1)[0])
    assert (known.length[seg], known.uses[seg]) == (19, 2)
    tier.check()


@pytest.mark.parametrize("grown", [0, 1, 2])
def test_a_segment_knows_its_last_two_keys(grown: int) -> None:
    segments = Segments(64, 1000)
    for length in range(1, 20):
        keys, end = chat(length, 30), length + grown
        seg = segments.add(NONE, 0, keys[:length])
        segments.uses[seg] = 1
        assert not grown or segments.extend(seg, length, 0.0, keys[length:end])
        assert segments.agreed(seg, keys, 0) == end
        assert segments.agreed(seg, [*keys[: end - 1], *chat(50, 5)], 0) == (end - 1 if end > 2 else 1)
        assert segments.agreed(seg, [*chat(60, 7), *keys[: end - 1]], 7) == (end - 1 if end > 2 else 1)
        if end > 2:
            assert segments.agreed(seg, [*keys[: end - 2], *chat(50, 5)], 0) == 1


def test_blocks_are_known_by_their_keys_alone_long_after_they_were_announced() -> None:
    segments = Segments(400, 1 << 20)
    known = PendingBlocks(64, segments)
    prompts = [chat(session, 20) for session in range(400)]
    for keys in prompts:
        known.make_room()
        known.add(segments.add(NONE, 0, keys), 0, keys)
    for number, keys in enumerate(prompts[-200:], 200):
        assert known.find(keys[5:]) == [(0, 15, number, 5)]
        assert known.find([keys[3], *keys[5:7], keys[4]]) == [(0, 1, number, 3), (1, 3, number, 5), (3, 4, number, 4)]
    assert known.find(prompts[0]) == [(0, 20, NONE, NONE)]
    segments.cut(399, prompts[399][:3])
    segments.drop(398)
    segments.add(NONE, 0, chat(500, 20))
    assert known.take([*prompts[397], *prompts[398], *prompts[399]]) == [
        (0, 20, 397, 0),
        (20, 40, NONE, NONE),
        (40, 60, NONE, NONE),
    ]
    assert len(known) <= known.kept_max

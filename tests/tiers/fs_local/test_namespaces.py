"""Namespaces side by side: another model's blocks stay until their room is needed, and go before any of ours."""

from __future__ import annotations

import pytest
from support_fs import keys as fs_keys
from support_fs import open_tier, options
from support_stack import PAGE, PLAIN, Engine, fs, keys, load, opened, stack_file, statuses, store, whole

from kvtier.config import stack_parts
from kvtier.control.tiers.owned_tier import OwnedTier
from kvtier.errors import IntegrityError
from kvtier.tier.contract import ForeignBlocks, Recovered, SlotSpace
from kvtier.types.arrays import int_array
from kvtier.types.geometry import GroupLayout, KVLayout, TensorRef
from kvtier.types.jobs import RegionFormat
from kvtier.types.keys import make_key
from kvtier.types.namespace import Namespace
from kvtier_fs.format import superblock

MIB = 1 << 20
SPACE = SlotSpace(40, (5,), (10,))
"""Five regions of four slots."""


def tier_of(recovered: Recovered, space: SlotSpace = SPACE) -> OwnedTier:
    tier = OwnedTier("fs", space, "lru")
    tier.restore(recovered)
    tier.check()
    return tier


def names(count: int, start: int = 0, group: int = 0):
    return [make_key(bytes([start + i]), group) for i in range(count)]


def take(tier: OwnedTier, keys_wanted) -> list[int]:
    slots = tier.reserve(keys_wanted)
    tier.commit(slots)
    tier.check()
    return slots


def test_free_slots_come_first_then_uncut_regions_then_others_by_age_then_our_own():
    ours = Recovered(
        keys=names(2),
        slots=int_array([0, 1]),
        generations=int_array([7, 8]),
        formats=(RegionFormat(0, 10, 1), RegionFormat(1, 10, 1), RegionFormat(2, 20, 4)),
        foreign=(ForeignBlocks(int_array([6]), (2,)), ForeignBlocks(int_array([5, 3]))),
    )
    tier = tier_of(ours)
    order = [take(tier, names(1, 10 + i))[0] for i in range(18)]
    assert sorted(order[:3]) == [2, 4, 7], "free slots of regions that have a format"
    assert sorted(order[3:11]) == [*range(12, 20)], "regions without a format"
    assert order[11] == 6, "the oldest namespace's slot"
    assert sorted(order[12:16]) == [8, 9, 10, 11], "its region of another size"
    assert order[16:18] == [5, 3], "the younger namespace, its oldest block first"
    assert tier.evictions == 0
    assert set(names(2)) < set(tier.directory)
    assert tier.placement.region_generation[2] == 5
    assert take(tier, names(1, 50)) == [0], "now our own oldest goes"
    assert tier.evictions == 1


def test_a_batch_takes_from_all_of_them_in_one_go():
    foreign = (ForeignBlocks(int_array([0, 1, 2])), ForeignBlocks(int_array([4]), (2, 3)))
    formats = (RegionFormat(0, 10, 1), RegionFormat(1, 10, 1), RegionFormat(2, 30, 1), RegionFormat(3, 30, 1))
    tier = tier_of(Recovered(formats=formats, foreign=foreign))
    slots = take(tier, names(20))
    assert len(set(slots)) == 20
    assert not set(slots[:8]) & {0, 1, 2, 4, *range(8, 16)}
    assert slots[8:12] == [0, 1, 2, 4]
    assert not tier.placement.has_unformatted


def test_slots_that_came_free_again_go_before_what_others_left():
    tier = tier_of(
        Recovered(formats=tuple(RegionFormat(r, 10, 1) for r in range(5)), foreign=(ForeignBlocks(int_array([9])),))
    )
    slots = tier.reserve(names(19))
    assert 9 not in slots
    tier.abort(slots[:2])
    tier.commit(slots[2:])
    assert sorted(take(tier, names(2, 40))) == sorted(slots[:2])
    assert take(tier, names(1, 50)) == [9]


def test_a_region_full_of_others_is_formatted_for_a_size_that_has_none_left():
    space = SlotSpace(40, (2,), (10, 20))
    formats = (RegionFormat(0, 10, 3), RegionFormat(1, 10, 2))
    tier = tier_of(Recovered(formats=formats, foreign=(ForeignBlocks(int_array([0, 1, 2, 3, 4])),)), space)
    assert take(tier, names(1)) == [5]
    assert take(tier, names(1, 10, group=1)) == [0]
    assert tier.placement.region_generation[0] == 4
    assert tier.evictions == 0
    assert sorted(take(tier, names(3, 20))) == [4, 6, 7]


def test_slots_of_others_must_be_free():
    bad = Recovered(formats=(RegionFormat(0, 10, 1),), foreign=(ForeignBlocks(int_array([2, 2])),))
    with pytest.raises(IntegrityError):
        tier_of(bad)


async def test_what_a_tier_reports_of_others_goes_by_namespace_then_by_age(tmp_path):
    settings = options(tmp_path / "root", capacity=2 * MIB)
    places = {}
    for tag, count in (("a", 5), ("b", 3), ("a", 0), ("c", 2)):
        async with open_tier(settings, tag=tag) as tier:
            taken = {slot for blocks in tier.opened.recovered.foreign for slot in blocks.slots.tolist()}
            tier.directory |= {bytes([n]) * 8: (slot, 0) for n, slot in enumerate(taken)}
            if count:
                mine = fs_keys(count, start=100 * len(places))
                await tier.store_all(mine)
                places[tag] = [tier.directory[key][0] for key in mine]
    (tmp_path / "root" / "snapshot").unlink()
    for how in ("scan", "snapshot"):
        async with open_tier(settings, tag="d") as tier:
            assert tier.backend.counters[f"open.{how}"] == 1
            found = [blocks.slots.tolist() for blocks in tier.opened.recovered.foreign]
            assert found == [places["b"], places["a"], places["c"]], "opened later means younger"
            assert len(tier.opened.recovered.keys) == 0


async def test_a_root_that_was_away_brings_nothing_back_from_before_a_reset(tmp_path, monkeypatch):
    monkeypatch.setattr(superblock, "MAX_NAMESPACES", 2)
    stays, leaves = tmp_path / "stays", tmp_path / "leaves"
    stored, both, alone = fs_keys(8), options(stays, leaves, capacity=4 * MIB), options(stays, capacity=2 * MIB)
    async with open_tier(both, tag="a") as tier:
        first = tier.backend._router.queues[1].root.first_region
        await tier.store(stored, [tier.format_region(first, 0)])
    async with open_tier(alone, tag="a") as tier:
        await tier.backend.reset(tier.epoch + 1)
    for tag in "bc":
        async with open_tier(alone, tag=tag):
            pass
    async with open_tier(both, tag="a") as tier:
        assert not tier.directory
        assert tier.epoch > 0


# -- real stacks -----------------------------------------------------------------------------------------------------

WIDE = KVLayout((GroupLayout((TensorRef(0, 3 * PAGE),)),))


class Model:
    """One model over the roots of all: the same keys as every other model's, and bytes of its own."""

    def __init__(self, root, number: int, shape: KVLayout = PLAIN) -> None:
        self.engine = Engine(shape, 32, worker=number)
        self.config = stack_file(shape, 32, fs(root, capacity=2 * MIB))
        self.name = f"model {number}"

    def running(self):
        return opened(stack_parts(self.config, Namespace(self.engine.layout, model=self.name), self.engine.kv_caches))

    async def store(self, stack, wanted) -> None:
        """Store keys and wait until the disk has them."""
        for start in range(0, len(wanted), 32):
            assert set(statuses(await store(stack, self.engine, whole(wanted[start : start + 32])))) == {"stored"}
            assert await stack.drain(20)

    async def load(self, stack, wanted) -> list[str]:
        """Load keys, every byte of what counts as loaded compared."""
        found: list[str] = []
        for start in range(0, len(wanted), 32):
            self.engine.wipe()
            found += statuses(await load(stack, self.engine, whole(wanted[start : start + 32])))
        return found


async def test_a_model_that_comes_back_finds_all_its_blocks_if_there_was_room_beside_them(tmp_path):
    first, second = Model(tmp_path / "r", 1), Model(tmp_path / "r", 2)
    wanted = keys(96)
    async with first.running() as stack:
        await first.store(stack, wanted)
    for _ in range(2):
        async with second.running() as stack:
            assert stack.locate(wanted[64:]) == [None] * 32, "the first model's blocks are not ours"
            await second.store(stack, wanted[:64])
            assert await second.load(stack, wanted[:64]) == ["loaded"] * 64
        async with first.running() as stack:
            assert stack.locate(wanted) == ["fs"] * 96
            assert await first.load(stack, wanted) == ["loaded"] * 96
            assert stack.stats().tiers["fs"].evictions == 0


@pytest.mark.parametrize("shape", [PLAIN, WIDE], ids=["one size", "another size"])
async def test_what_is_overwritten_is_the_oldest_model_s_and_never_our_own(tmp_path, shape):
    oldest, older, ours = Model(tmp_path / "r", 1, shape), Model(tmp_path / "r", 2), Model(tmp_path / "r", 3)
    wanted = keys(32)
    async with oldest.running() as stack:
        await oldest.store(stack, keys(32))
    async with older.running() as stack:
        await older.store(stack, wanted)
        slots = sum(stack.stats().tiers["fs"].slots.values())
    mine = keys(slots - 40 if shape is PLAIN else slots - 70)
    async with ours.running() as stack:
        await ours.store(stack, mine)
        assert stack.stats().tiers["fs"].evictions == 0
        assert await ours.load(stack, mine) == ["loaded"] * len(mine)
    async with older.running() as stack:
        assert await older.load(stack, wanted) == ["loaded"] * 32, "the younger model lost nothing"
    async with oldest.running() as stack:
        left = await oldest.load(stack, wanted)
        assert set(left) == {"loaded", "missing"}
        assert 0 < left.count("loaded") < 32
    async with ours.running() as stack:
        assert await ours.load(stack, mine) == ["loaded"] * len(mine)
        more = keys(2 * slots, start=1000)
        await ours.store(stack, more)
        assert stack.stats().tiers["fs"].evictions > 0
    async with older.running() as stack:
        assert stack.locate(wanted) == [None] * 32, "all room is the newest model's by now"

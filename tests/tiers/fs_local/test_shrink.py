"""A slab root whose capacity was lowered: its newest blocks stay, the oldest go, and the number of these is said."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest
import support_fs as support
from support_protections_fs import without_moving

from kvtier.types.keys import OffloadKey
from kvtier_fs.local import shrinking
from kvtier_fs.local.root import Root

LARGE, SMALL, SMALLEST = 16 << 20, 5 << 20, 1 << 20
"""The last one is less than one region of the first."""
ALL = support.keys(600)


async def fill(root: Path, rng: Random, tag: str = "", count: int = 600) -> list[OffloadKey]:
    """Store blocks in random slots, so that the newest lie in every region. Returns them from the oldest on."""
    names = rng.sample(ALL[:count], count)
    async with support.open_tier(support.options(root, capacity=LARGE), tag=tag) as tier:
        await tier.store_all(names)
        tier.directory.clear()
        slots = list(tier.free_slots(0))
        rng.shuffle(slots)
        left = iter(slots)
        tier.free_slots = lambda group: left  # type: ignore[method-assign, misc]
        for at in range(0, count, 20):
            assert all(outcome.ok for outcome in await tier.store(names[at : at + 20]))
    return names


def evicted(notes: Sequence[str]) -> int:
    (note,) = [note for note in notes if "evicted to keep the capacity" in note]
    return int(note.split(": ", 1)[1].split()[0])


@pytest.mark.parametrize("small", [SMALL, SMALLEST])
@pytest.mark.parametrize("clean", [True, False])
async def test_the_newest_blocks_stay(tmp_path: Path, clean: bool, small: int, seed: int) -> None:
    root = tmp_path / "root"
    stored = await fill(root, Random(seed))
    if not clean:
        (root / "snapshot").unlink()
    async with support.open_tier(support.options(root, capacity=small)) as tier:
        assert support.bytes_on_disk(root) <= small
        kept = list(tier.opened.recovered.keys)
        assert len(kept) == tier.space.num_regions * (tier.space.region_bytes // tier.space.slot_bytes[0])
        assert kept == stored[-len(kept) :], "exactly the newest, in their order"
        assert evicted(tier.opened.notes) == len(stored) - len(kept)
        assert all(outcome.ok for outcome in await tier.load_all(kept)), "every byte is compared"
    async with support.open_tier(support.options(root, capacity=small)) as tier:
        assert list(tier.opened.recovered.keys) == kept
        assert not any("evicted" in note for note in tier.opened.notes)
        assert all(outcome.ok for outcome in await tier.load_all(kept))


async def test_without_moving_the_newest_go(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = await fill(tmp_path / "root", Random(seed))
    without_moving(monkeypatch)
    async with support.open_tier(support.options(tmp_path / "root", capacity=SMALL)) as tier:
        kept = list(tier.opened.recovered.keys)
        assert set(kept) != set(stored[-len(kept) :])


async def test_an_opening_that_ended_in_the_middle_loses_no_new_block(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "root"
    stored = await fill(root, Random(seed))
    move, left = shrinking._move, iter((1, 1))

    async def killed(*arguments: object) -> None:
        if not next(left, 0):
            raise OSError(5, "killed")
        await move(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(shrinking, "_move", killed)
    monkeypatch.setattr(shrinking, "_BATCH_MAX", 8)
    with pytest.raises(Exception, match="cannot be used"):
        async with support.open_tier(support.options(root, capacity=SMALL)):
            pass
    monkeypatch.undo()
    async with support.open_tier(support.options(root, capacity=SMALL)) as tier:
        kept = list(tier.opened.recovered.keys)
        assert kept == stored[-len(kept) :]
        assert support.bytes_on_disk(root) <= SMALL
        assert all(outcome.ok for outcome in await tier.load_all(kept))


@pytest.mark.parametrize("steps", [0, 3, 12, 20])
async def test_dividing_a_region_that_was_cut_short_serves_no_wrong_byte(
    tmp_path: Path, seed: int, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "root"
    stored = await fill(root, Random(seed))
    shift, left = shrinking._shift, iter([1] * steps)

    async def killed(*arguments: object) -> object:
        if not next(left, 0):
            raise OSError(5, "killed")
        return await shift(*arguments)  # type: ignore[arg-type]

    with monkeypatch.context() as killing:
        killing.setattr(shrinking, "_shift", killed)
        with pytest.raises(Exception, match="cannot be used"):
            async with support.open_tier(support.options(root, capacity=SMALLEST)):
                pass
    async with support.open_tier(support.options(root, capacity=SMALLEST)) as tier:
        kept = list(tier.opened.recovered.keys)
        assert support.bytes_on_disk(root) <= SMALLEST
        loaded = await tier.load_all(kept)
        assert sum(outcome.ok for outcome in loaded) >= len(kept) - steps - 1, "every byte of these is compared"
        assert set(kept) <= set(stored)


async def test_blocks_of_other_namespaces_go_first(tmp_path: Path, seed: int) -> None:
    root = tmp_path / "root"
    await fill(root, Random(seed), tag="theirs", count=300)
    async with support.open_tier(support.options(root, capacity=LARGE)) as tier:
        for region in range(4, 6):
            tier.region_sizes = {}
            await tier.store(ALL[(region - 4) * 20 :][:20], [tier.format_region(region, 0)])
    async with support.open_tier(support.options(root, capacity=SMALL)) as tier:
        kept = list(tier.opened.recovered.keys)
        assert set(kept) == set(ALL[:40])
        assert all(outcome.ok for outcome in await tier.load_all(kept))


async def test_an_opening_does_not_move_for_long(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "root"
    stored = await fill(root, Random(seed))
    monkeypatch.setattr(shrinking, "MOVE_SECONDS", 0.0)
    async with support.open_tier(support.options(root, capacity=SMALL)) as tier:
        kept = list(tier.opened.recovered.keys)
        assert evicted(tier.opened.notes) >= len(stored) - len(kept) > 0
        assert all(outcome.ok for outcome in await tier.load_all(kept))


async def test_a_superblock_that_lies_of_its_regions_takes_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "root"
    await fill(root, Random(1), count=100)
    read = shrinking.plan_to_read

    async def lying(of: Root, plan: shrinking.RegionPlan, sizes: Sequence[int]) -> shrinking.RegionPlan:
        assert of.stored is not None
        of.stored = shrinking.replace(of.stored, regions=1 << 31)
        found = await read(of, plan, sizes)
        assert found.regions <= plan.regions + 128
        return found

    monkeypatch.setattr("kvtier_fs.local.opening.plan_to_read", lying)
    async with support.open_tier(support.options(root, capacity=LARGE)):
        pass

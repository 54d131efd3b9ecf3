"""Several processes on one server: what they share, what a reset does to the others, and a marker that is lost."""

from __future__ import annotations

from support_hits import NAMES, hits, stored
from support_valkey import Blocks

from kvtier.types.jobs import DropReason


async def test_a_reset_is_obeyed_by_others_after_their_own(server, tmp_path):
    suite = Blocks(server)
    async with suite.opened(tmp_path) as one, suite.opened(tmp_path) as other:
        await stored(one)
        assert await hits(other) == 4
        await one.tier.reset(1)
        one.epoch = 1
        assert await hits(one) == 0
        assert await hits(other) == 4, "who has not reset goes on with its own weights"
        async with suite.opened(tmp_path) as late:
            assert late.opened.epoch == 1
            assert await hits(late) == 0
            await stored(one)
            assert await hits(late) == 4
        await other.tier.reset(1)
        other.epoch = 1
        assert await hits(other) == 4, "now it finds what was stored under the new epoch"


async def test_a_job_of_an_earlier_epoch_moves_nothing(server, tmp_path):
    async with Blocks(server).opened(tmp_path) as driver:
        await stored(driver)
        load, store = driver.load_job(NAMES), driver.store_job(NAMES)
        await driver.tier.reset(1)
        assert {outcome.status for group in (await driver.tier.load(load)).outcomes for outcome in group} == {"missing"}
        result = await driver.tier.store(store)
        assert {outcome.reason for group in result.outcomes for outcome in group} == {DropReason.RESET}


async def test_epochs_are_never_lowered(server, tmp_path):
    suite = Blocks(server)
    async with suite.opened(tmp_path) as one, suite.opened(tmp_path) as other:
        await one.tier.reset(300)
        await other.tier.reset(2)
    async with suite.opened(tmp_path) as driver:
        assert driver.opened.epoch > 300, "whose weights the lower number meant is not known"


async def test_a_lost_marker_loses_hits_and_nothing_else(server, tmp_path):
    """After a reset, too, nothing from before comes back with a marker that is made anew."""
    suite = Blocks(server)
    async with suite.opened(tmp_path) as one:
        await stored(one)
        await one.tier.reset(1)
        one.epoch = 1
        await stored(one)
        (marker,) = server.names("*:m:*")
        server.client.delete(marker)
        assert await hits(one) == 4, "names are enough for who knows them"
        async with suite.opened(tmp_path) as other:
            assert other.opened.epoch == 0
            assert await hits(other) == 0
            await stored(other)
        await one.tier.reset(2)
        one.epoch = 2
        assert await hits(one) == 0
        await stored(one)
        async with suite.opened(tmp_path) as third:
            assert third.opened.epoch > 2
            assert await hits(third) == 0, "a reset holds for all that open later"
        assert await hits(one) == 4, "it goes on alone"
    for name in server.names("*:m:*"):
        server.client.set(name, "no marker of ours")
    async with suite.opened(tmp_path) as driver:
        assert await hits(driver) == 0


async def test_epochs_that_were_counted_otherwise_are_never_shared(server, tmp_path):
    """One process knows the marker that was lost, another one the marker made anew, and both reset with each new
    weights: the numbers of their epochs differ. What was stored under a number by one counts for no other weights."""
    suite = Blocks(server)
    async with suite.opened(tmp_path) as old:
        await old.tier.reset(1)
        server.client.delete(*server.names("*:m:*"))
        async with suite.opened(tmp_path) as new:
            assert (old.epoch, new.opened.epoch) == (0, 0)
            await old.tier.reset(2)
            await new.tier.reset(1)
            old.epoch, new.epoch = 2, 1
            await stored(old)  # with the second weights
            await stored(new)
            await new.tier.reset(2)  # for the third weights
            new.epoch = 2
            assert await hits(new) == 0
            async with suite.opened(tmp_path) as late:
                assert await hits(late) == 0


async def test_a_process_that_missed_a_reset_goes_on_alone(server, tmp_path):
    """It cannot know whether what others stored under its number is of the same weights."""
    suite = Blocks(server)
    async with suite.opened(tmp_path) as one, suite.opened(tmp_path) as late:
        for epoch in (1, 2):
            await one.tier.reset(epoch)
            one.epoch = epoch
            await stored(one)
        await late.tier.reset(1)
        late.epoch = 1
        assert await hits(late) == 0
        await stored(late)
        assert await hits(late) == 4
        assert await hits(one) == 4

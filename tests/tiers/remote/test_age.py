"""`max_age` of remote tiers: a block that is too old is a miss and goes."""

from __future__ import annotations

import time
from pathlib import Path

from support_objects import Blocks as ObjectBlocks
from support_objects import Folder, LocalBackend, LocalOptions, names
from support_valkey import Blocks

from kvtier.testing.conformance import make_keys
from kvtier_remote import ValkeyBackend

KEYS = [*make_keys(2, 0), *make_keys(2, 1)]
DAY_NS = 86400 * 10**9


class OtherDay:
    """Opens tiers by a wall clock that is some days off."""

    days = 0.0

    def other_day_ns(self) -> int:
        return time.time_ns() + int(self.days * DAY_NS)


class ValkeyDays(OtherDay, Blocks):
    def make(self, place: Path) -> ValkeyBackend:
        return ValkeyBackend(self.server.options(**self.changes), self.other_day_ns)


class ObjectDays(OtherDay, ObjectBlocks):
    def make(self, place: Path) -> LocalBackend:
        options = LocalOptions.model_validate({"bucket": str(self.bucket.path)} | self.changes)
        return LocalBackend(options, self.other_day_ns)


async def statuses(driver) -> set[str]:
    return {str(outcome.status) for outcome in (await driver.load(KEYS)).values()}


async def ages(suite: OtherDay, place: Path) -> int:
    """Store, and load when the blocks are too old and before. Returns how many were refused."""
    async with suite.opened(place) as driver:
        assert all(outcome.ok for outcome in (await driver.store(KEYS)).values())
        suite.days = 6.9
        assert await statuses(driver) == {"loaded"}
        suite.days = 7.1
        assert await statuses(driver) == {"missing"}
        assert list(await driver.tier.lookup(KEYS)) == ["miss"] * 4, "a load removes it"
        assert all(outcome.ok for outcome in (await driver.store(KEYS)).values())
        assert await statuses(driver) == {"loaded"}
        suite.days = -7.1
        assert await statuses(driver) == {"missing"}, "stored by a clock that was far ahead"
        return driver.tier.counters["mismatch.generation"]


async def test_a_block_on_a_server_that_is_too_old_is_not_loaded_and_removed(server, tmp_path):
    assert await ages(ValkeyDays(server, max_age="7d"), tmp_path) == 8


async def test_an_object_that_is_too_old_is_not_loaded_and_removed(tmp_path):
    bucket = Folder(tmp_path / "bucket")
    assert await ages(ObjectDays(bucket, max_age="7d"), tmp_path) == 8
    assert names(bucket.store, "kvtier/b") == []


async def test_a_server_removes_a_block_by_itself(server, tmp_path):
    for changes, days in (({"max_age": "2d"}, 2), ({"max_age": "2d", "expire": "1d"}, 1), ({"expire": "3d"}, 3)):
        async with Blocks(server, **changes).opened(tmp_path) as driver:
            await driver.store(KEYS)
            times = [server.client.ttl(name) for name in server.names("*:b:*")]
            assert all(days * 86400 - 600 < seconds <= days * 86400 for seconds in times)
            server.client.flushall()


async def test_without_a_limit_age_does_not_count(server, tmp_path):
    suite = ValkeyDays(server)
    async with suite.opened(tmp_path) as driver:
        await driver.store(KEYS)
        suite.days = 4000
        assert await statuses(driver) == {"loaded"}

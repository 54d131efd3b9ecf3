"""What lies in a bucket: names that tell nothing, markers that grow in number, values that are believed in nothing.

The bucket is a local folder behind the client library.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import re
import threading
import time
from datetime import UTC, datetime, timedelta
from pickle import PickleBuffer
from types import SimpleNamespace

import obstore
import pytest
from support_hits import LARGE, NAMES, SMALL, hits, stored
from support_objects import Blocks, Folder, LocalTransport, names, read, write
from support_stack import until
from support_values import DAMAGED_VALUES

from kvtier.testing.conformance import make_keys
from kvtier.types.jobs import MISSING, BlockStatus, DropReason
from kvtier_remote.objects import renewal, transport
from kvtier_remote.objects.library import errno_of, outcome_of
from kvtier_remote.objects.tier import ObjectBackend
from kvtier_remote.transport import Marker, Value, ValueRef

BLOCK = re.compile(r"kvtier/b/([0-9a-f]{2})/[0-9a-f]{16}\.[0-9a-f]{24}\.\1[0-9a-f]{38}")
MARKER = re.compile(r"kvtier/m/[0-9a-f]{16}/([0-9]{20})\.[0-9a-f]{16}")


@pytest.fixture
def folder(tmp_path) -> Folder:
    return Folder(tmp_path / "bucket")


async def test_names_tell_nothing_and_one_marker_stays(folder, tmp_path):
    async with Blocks(folder).opened(tmp_path) as driver:
        await stored(driver)
        await driver.tier.reset(1)
        await driver.tier.reset(3)
    found = names(folder.store)
    blocks = [name for name in found if "/b/" in name]
    assert len(blocks) == 4
    assert all(BLOCK.fullmatch(name) for name in blocks)
    assert not any(key[:8].hex() in name for key in NAMES for name in found)
    manifests = [name for name in found if "/manifests/" in name]
    assert all(re.fullmatch(r"kvtier/manifests/[0-9a-f]{16}\.json", name) for name in manifests)
    leases = [name for name in found if "/l/" in name]
    assert all(re.fullmatch(r"kvtier/l/[0-9a-f]{16}\.[0-9a-f]{24}", name) for name in leases)
    markers = sorted(set(found) - set(blocks) - set(manifests) - set(leases))
    assert [int(MARKER.fullmatch(name)[1]) for name in markers] == [3], "those before the one that counts are removed"
    assert all(read(folder.store, name) == b"" for name in markers)


async def test_with_all_markers_deleted_after_a_reset_nothing_is_found(folder, tmp_path):
    async with Blocks(folder).opened(tmp_path) as driver:
        await stored(driver)
        await driver.tier.reset(1)
        driver.epoch = 1
        await stored(driver)
        assert await hits(driver) == 4
    obstore.delete(folder.store, names(folder.store, "kvtier/m"))
    async with Blocks(folder).opened(tmp_path) as driver:
        assert driver.opened.epoch == 0
        assert await hits(driver) == 0
        await stored(driver)
        assert await hits(driver) == 4
    assert len(names(folder.store, "kvtier/b")) == 12


async def test_of_two_first_markers_made_at_once_the_smaller_counts_for_both(folder):
    """The other process has seen none either, and its marker appears when this one has looked at its own."""

    class Racing(LocalTransport):
        race_seconds = 60.0
        looks = 0

        async def _markers(self, name):
            self.looks += 1
            if self.looks == 2:
                write(folder.store, f"{name}/{0:020d}.{bytes(8).hex()}", b"")
            return await super()._markers(name)

    tier = folder.tier(request_timeout_seconds=0.5)
    one = Racing(tier.options, tier._connect)
    await one.open()
    assert await one.swap_marker("kvtier/m/n", None, Marker(b"\xff" * 8, 0)) == Marker(bytes(8), 0)
    assert await one.close(5) == 0


async def test_hosts_that_open_at_once_share_what_they_store(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(LocalTransport, "race_seconds", 0.3)
    suite = Blocks(folder)
    contexts = [suite.opened(tmp_path) for _ in range(3)]
    drivers = await asyncio.gather(*(context.__aenter__() for context in contexts))
    await stored(drivers[0])
    assert [await hits(driver) for driver in drivers] == [4, 4, 4]
    for context in contexts:
        await context.__aexit__(None, None, None)


async def test_a_smaller_marker_that_comes_late_costs_hits_until_the_next_opening(folder, tmp_path):
    suite = Blocks(folder)
    async with suite.opened(tmp_path) as one:
        await stored(one)
        (name,) = names(folder.store, "kvtier/m")
        write(folder.store, name.rpartition("/")[0] + f"/{0:020d}.{bytes(8).hex()}", b"")
        async with suite.opened(tmp_path) as other:
            assert await hits(other) == 0
            await stored(other)
            assert await hits(one) == 4
    async with suite.opened(tmp_path) as one, suite.opened(tmp_path) as other:
        assert [await hits(one), await hits(other)] == [4, 4]


async def test_what_is_no_marker_of_ours_is_none(folder, tmp_path):
    async with Blocks(folder).opened(tmp_path) as driver:
        await stored(driver)
    (name,) = names(folder.store, "kvtier/m")
    home = name.rpartition("/")[0]
    for other in ("7.x", "9" * 20, f"{5:020d}.0123", f"deeper.{5:020d}.{bytes(8).hex()}"):
        write(folder.store, f"{home}/{other}", b"")
    async with Blocks(folder).opened(tmp_path) as driver:
        assert driver.opened.epoch == 0
        assert await hits(driver) == 4


def changed(change):
    def damage(store, found):
        write(store, found[0], change(read(store, found[0])))
        return 1

    return damage


def swapped(store, found):
    one, other = (read(store, name) for name in found)
    write(store, found[0], other)
    write(store, found[1], one)
    return 2


def gone(store, found):
    obstore.delete(store, found[0])
    return 1


DAMAGE = {"exchanged": swapped, "gone": gone, **{name: changed(change) for name, change in DAMAGED_VALUES.items()}}
LENGTHS = ("truncated", "one byte longer", "much longer", "empty")


@pytest.mark.parametrize("group", [LARGE, SMALL], ids=["large", "small"])
@pytest.mark.parametrize("kind", DAMAGE)
async def test_no_damaged_object_is_loaded_and_none_harms_another(folder, tmp_path, kind, group):
    async with Blocks(folder).opened(tmp_path) as driver:
        assert all(outcome.ok for outcome in (await driver.store(make_keys(2, group))).values())
        found = names(folder.store, "kvtier/b")
        assert all(outcome.ok for outcome in (await driver.store(make_keys(2, 1 - group))).values())
        expected = DAMAGE[kind](folder.store, found)
        outcomes = await driver.load(NAMES)
        assert sum(not outcome.ok for outcome in outcomes.values()) == expected, outcomes
        counted = {name for name in driver.tier.counters if name.startswith("mismatch.")}
        assert bool(counted) == any(outcome.status == "corrupt" for outcome in outcomes.values())
        assert ("mismatch.payload_bytes" in counted) == (kind in LENGTHS)
        found = await driver.tier.lookup(NAMES)
        assert [one == "hit" for one in found] == [outcomes[key].ok for key in NAMES], "it was not removed"
        await stored(driver)
        assert await hits(driver) == 4


def failing(text: str, kind: type[Exception] = Exception) -> Exception:
    return kind(f"Generic S3 error: Error performing PUT http://rgw/kv/secret-name in 1ms - {text}")


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("Server returned non-2xx status code: 403 Forbidden: <Code>AccessDenied</Code>", errno.EACCES),
        ("Server returned non-2xx status code: 401 Unauthorized", errno.EACCES),
        ("Server returned non-2xx status code: 404 Not Found: <Code>NoSuchBucket</Code>", errno.ENOENT),
        ("Server returned non-2xx status code: 429 Too Many Requests", errno.EBUSY),
        ("Server returned non-2xx status code: 503 Slow Down", errno.EBUSY),
        ("Server returned non-2xx status code: 500 Internal", errno.EIO),
        ("HTTP error: kind: Timeout", errno.ETIMEDOUT),
        ("kind: Connect, Os {\n   code: 111, kind: ConnectionRefused}", errno.ECONNREFUSED),
        ("kind: Request, Os {\n   code: 104, kind: ConnectionReset}", errno.ECONNRESET),
        ("kind: Connect, dns error", errno.ECONNREFUSED),
        ("kind: Decode, source: hyper::Error(IncompleteMessage)", errno.ECONNRESET),
        ("something else", errno.EIO),
    ],
)
def test_an_error_is_the_errno_nearest_to_it(text, number):
    assert errno_of(failing(text)) == number
    assert outcome_of(failing(text)).errno == number


def test_a_full_store_is_no_failure():
    for text in (
        "status code: 403 Forbidden: <Code>QuotaExceeded</Code>",
        "status code: 507 Insufficient Storage",
        "Os {\n        code: 28, kind: StorageFull }",
    ):
        assert outcome_of(failing(text)).reason is DropReason.DISK_FULL


class SlowLibrary(SimpleNamespace):
    """A library whose calls take until they are let go, and that keeps a row's memory for a while after that."""

    exceptions = obstore.exceptions

    def __init__(self) -> None:
        self.at_once = self.most_at_once = 0
        self.held: PickleBuffer | None = None

    async def put_async(self, store, name, parts, use_multipart):
        self.held = PickleBuffer(parts[1])
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            asyncio.get_running_loop().call_later(0.05, self.held.release)
            raise

    async def head_async(self, store, name):
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        await asyncio.sleep(0.002)
        self.at_once -= 1
        raise FileNotFoundError


@pytest.fixture(params=[20])
async def slow(folder, monkeypatch, request):
    """A transport over a SlowLibrary, with a limit for each request in seconds."""
    tier = folder.tier(requests=3, request_timeout_seconds=request.param)
    one = LocalTransport(tier.options, tier._connect)
    await one.open()
    library = SlowLibrary()
    monkeypatch.setattr(transport, "library", lambda: library)
    yield one, library
    assert await one.close(5) == 0


@pytest.mark.parametrize("slow", [0.2], indirect=True)
async def test_a_put_that_was_given_up_returns_when_the_library_no_longer_has_the_row(slow):
    one, library = slow
    row = bytearray(1000)
    with memoryview(row) as payload:
        (outcome,) = await one.put([Value(ValueRef("kvtier/b/x", 10, 1000), payload, bytes(10))])
    assert outcome.errno == errno.ETIMEDOUT
    with pytest.raises(ValueError, match="released"):
        library.held.raw()


async def test_no_more_lookups_are_in_flight_than_the_options_say(slow):
    one, library = slow
    places = [ValueRef(f"kvtier/b/{i}", 10, 1000) for i in range(20)]
    assert [*await asyncio.gather(one.present(places), one.present(places))] == [[False] * 20] * 2
    assert library.most_at_once == 3


@pytest.mark.parametrize("slow", [1.0], indirect=True)
async def test_a_request_that_was_stuck_when_the_transport_closed_takes_its_threads_along(slow):
    one, library = slow
    value = Value(ValueRef("kvtier/b/x", 10, 1000), memoryview(bytearray(1000)), bytes(10))
    putting = asyncio.create_task(one.put([value]))
    await until(lambda: library.held is not None)
    assert await one.close(0.0) == 1
    assert (await putting)[0].errno == errno.ETIMEDOUT
    await until(lambda: not any(thread.name.startswith("kvtier-objects") for thread in threading.enumerate()))


async def test_a_request_of_a_closed_transport_fails(folder):
    tier = folder.tier()
    one = LocalTransport(tier.options, tier._connect)
    await one.open()
    assert await one.close(5) == 0
    value = Value(ValueRef("kvtier/b/x", 10, 10), memoryview(bytearray(10)), bytes(10))
    assert [outcome.errno for outcome in await one.put([value])] == [errno.ENOTCONN]
    with pytest.raises(OSError, match="closed"):
        await one.present([value.place])


async def test_nothing_of_a_failed_request_is_in_a_log_or_an_error(folder, tmp_path, caplog, monkeypatch):
    class Failing(SlowLibrary):
        async def put_async(self, *given, **more):
            raise failing("status code: 500", obstore.exceptions.GenericError)

        async def get_async(self, *given, **more):
            raise failing("status code: 500", obstore.exceptions.GenericError)

        async def head_async(self, *given):
            raise failing("status code: 500", obstore.exceptions.GenericError)

        def list(self, *given):
            raise failing("status code: 500", obstore.exceptions.GenericError)

    with caplog.at_level(logging.DEBUG):
        async with Blocks(folder).opened(tmp_path) as driver:
            monkeypatch.setattr(transport, "library", Failing)
            assert {outcome.errno for outcome in (await driver.store(NAMES)).values()} == {errno.EIO}
            assert {outcome.errno for outcome in (await driver.load(NAMES)).values()} == {errno.EIO}
            assert set(await driver.tier.lookup(NAMES)) == {"retry"}
            with pytest.raises(Exception, match="the epoch cannot be raised") as caught:
                await driver.tier.reset(1)
            assert "secret-name" not in f"{caught.value} {caught.value.__cause__}"
    assert "secret-name" not in caplog.text


async def test_what_was_removed_by_others_is_a_miss(folder, tmp_path):
    async with Blocks(folder).opened(tmp_path) as driver:
        await stored(driver)
        obstore.delete(folder.store, names(folder.store, "kvtier/b"))
        assert set((await driver.load(NAMES)).values()) == {MISSING}
        assert {outcome.status for outcome in (await driver.store(NAMES)).values()} == {BlockStatus.STORED}


class CopyingLibrary(SimpleNamespace):
    """A library that writes down what it is asked to copy. Objects were last written `written_ns` ago."""

    exceptions = obstore.exceptions

    def __init__(self, age_days: float) -> None:
        self.age_days = age_days
        self.asked: list[str] = []
        self.copied: list[str] = []

    async def head_async(self, store, name):
        self.asked.append(name)
        return {"last_modified": datetime.now(UTC) - timedelta(days=self.age_days)}

    async def copy_async(self, store, name, to):
        assert name == to
        self.copied.append(name)


@pytest.mark.parametrize(
    ("stored_days", "renewed_days", "budget", "asked", "copied"),
    [(1.4, 1.4, None, 0, 0), (2, 2, None, 1, 1), (2, 0.5, None, 1, 0), (2, 2, "24GiB", 1, 0)],
    ids=["young", "old", "renewed since", "no budget"],
)
async def test_an_old_block_is_renewed_once_and_within_the_budget(
    folder, tmp_path, monkeypatch, stored_days, renewed_days, budget, asked, copied
):
    """A write budget that starts empty allows no copy."""
    async with Blocks(folder).opened(tmp_path) as driver:
        await stored(driver)
    suite = Blocks(folder, renew=True, expire_days=3, write_bytes_per_day=budget)
    suite.wall_ns = lambda: time.time_ns() + int(stored_days * 86_400e9)
    library = CopyingLibrary(renewed_days - stored_days)
    monkeypatch.setattr(renewal, "library", lambda: library)
    monkeypatch.setattr(renewal, "store_of", lambda options, headers: "store")
    if budget:
        monkeypatch.setattr(ObjectBackend, "_may_write", refusing)
    async with suite.opened(tmp_path) as driver:
        for _ in range(3):
            assert (await driver.load(NAMES[:1]))[NAMES[0]].ok
    assert (len(library.asked), len(library.copied)) == (asked, copied)
    assert driver.tier.counters["renewed"] == copied


async def refusing(tier, size) -> bool:
    """No byte may be written."""
    return False

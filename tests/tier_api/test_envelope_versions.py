"""Two releases whose envelopes have different versions share a store: each misses the other's blocks, and leaves them.

The other release is this one with another version of the envelope, and perhaps without a version in its names.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import support_files
import support_fs
import support_objects
import support_valkey
from support_protections_fs import without_other_versions

from kvtier.testing.conformance import ConformanceBase, make_keys
from kvtier.tier import block_envelope
from kvtier.tier.inspection import Access, CheckStep, Inspection
from kvtier.types.jobs import BlockOutcome, BlockStatus
from kvtier.types.keys import OffloadKey
from kvtier_fs.inspect.local import LocalInspection
from kvtier_fs.inspect.shared import SharedInspection
from kvtier_fs.shared import paths
from kvtier_fs.shared.tier import SharedFSBackend
from kvtier_remote import names as remote_names
from kvtier_remote.inspect import RemoteInspection
from kvtier_remote.valkey.listing import ValkeyListing

KEYS = make_keys(4)


class FilesSuite(ConformanceBase):
    """A shared root."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def make(self, place: Path) -> SharedFSBackend:
        return SharedFSBackend(support_files.options(self.root))

    def inspection(self, access: Access) -> Inspection:
        found = SharedInspection.inspect(str(self.root), access)
        assert found is not None
        return found


class ValkeySuite(support_valkey.Blocks):
    """A server."""

    def inspection(self, access: Access) -> Inspection:
        return RemoteInspection(ValkeyListing(self.server.options()))


class ObjectsSuite(support_objects.Blocks):
    """A bucket that is a folder, without tools."""


@pytest.fixture(scope="module")
def server() -> Iterator[support_valkey.Server]:
    with support_valkey.valkey_server() as one:
        yield one


Store = FilesSuite | ValkeySuite | ObjectsSuite


@pytest.fixture(params=["shared_fs", "valkey", "objects"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "shared_fs":
        return FilesSuite(tmp_path / "root")
    if request.param == "objects":
        return ObjectsSuite(support_objects.Folder(tmp_path / "bucket"))
    one: support_valkey.Server = request.getfixturevalue("server")
    one.client.flushall()
    return ValkeySuite(one)


@contextmanager
def other_release(version: int = 2, in_names: bool = True) -> Iterator[None]:
    """What runs meanwhile is of another release."""
    with pytest.MonkeyPatch.context() as patching:
        patching.setattr(block_envelope, "ENVELOPE_VERSION", version)
        if not in_names:
            for module in (paths, remote_names):
                patching.setattr(module, "version_suffix", lambda: "")
        yield


async def put(store: Store, path: Path) -> dict[OffloadKey, BlockOutcome]:
    async with store.opened(path) as driver:
        return dict(await driver.store(KEYS))


async def got(store: Store, path: Path) -> tuple[list[BlockStatus], dict[str, int]]:
    """What a new opening loads, and its counters."""
    async with store.opened(path) as driver:
        outcomes = await driver.load(KEYS)
        return [outcomes[key].status for key in KEYS], dict(driver.tier.counters)


def alarms(counters: dict[str, int]) -> dict[str, int]:
    return {name: count for name, count in counters.items() if name.startswith(("mismatch", "removed")) and count}


LOADED, MISSING = [BlockStatus.LOADED] * len(KEYS), [BlockStatus.MISSING] * len(KEYS)


async def test_each_release_loads_its_own_and_leaves_the_other_ones(store: Store, tmp_path: Path) -> None:
    await put(store, tmp_path)
    with other_release():
        assert (await got(store, tmp_path))[0] == MISSING
        assert all(outcome.status is BlockStatus.STORED for outcome in (await put(store, tmp_path)).values())
    with other_release(version=3):
        await put(store, tmp_path)
    for version in (1, 2, 3, 1):
        with other_release(version):
            statuses, counters = await got(store, tmp_path)
            assert statuses == LOADED
            assert not alarms(counters)


async def test_a_block_of_another_version_under_our_name_is_missing_and_stays(store: Store, tmp_path: Path) -> None:
    with other_release(in_names=False):
        await put(store, tmp_path)
    for _ in range(2):
        statuses, counters = await got(store, tmp_path)
        assert statuses == MISSING
        assert not alarms(counters)
    with other_release(in_names=False):
        assert (await got(store, tmp_path))[0] == LOADED


async def test_without_the_rule_it_is_taken_for_damage(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with other_release(in_names=False):
        await put(store, tmp_path)
    without_other_versions(monkeypatch)
    statuses, counters = await got(store, tmp_path)
    assert statuses == [BlockStatus.CORRUPT] * len(KEYS)
    assert alarms(counters)
    monkeypatch.undo()
    with other_release(in_names=False):
        assert (await got(store, tmp_path))[0] == MISSING, "they were removed"


def steps(store: Store, access: Access, work: Callable[[Inspection], Iterator[CheckStep]]) -> list[CheckStep]:
    inspection = store.inspection(access)
    try:
        return list(work(inspection))
    finally:
        inspection.close()


@pytest.mark.parametrize("in_names", [True, False])
@pytest.mark.parametrize("kind", ["shared_fs", "valkey"])
def test_the_tools_neither_count_nor_remove_them(
    kind: str, in_names: bool, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    store: Store = FilesSuite(tmp_path / "root")
    if kind == "valkey":
        one: support_valkey.Server = request.getfixturevalue("server")
        one.client.flushall()
        store = ValkeySuite(one)
    if in_names:
        asyncio.run(put(store, tmp_path))
    with other_release(in_names=in_names):
        asyncio.run(put(store, tmp_path))
    for access, repair in ((Access.READ, False), (Access.CHANGE, True)):
        found = steps(store, access, lambda inspection, repair=repair: inspection.check(repair))
        assert [one for step in found for one in step.findings if one.kind.is_damage] == []
        assert sum(step.whole for step in found) == (len(KEYS) if in_names else 0)
    steps(store, Access.CHANGE, lambda inspection: inspection.drop(lambda block: in_names))
    with other_release(in_names=in_names):
        assert asyncio.run(got(store, tmp_path))[0] == LOADED
    if in_names:
        assert asyncio.run(got(store, tmp_path))[0] == MISSING


async def test_a_slab_of_another_version_holds_nothing_and_raises_no_alarm(tmp_path: Path) -> None:
    settings, names = support_fs.options(tmp_path / "root"), support_fs.keys(6)
    for clean in (True, False):
        with other_release():
            async with support_fs.open_tier(settings) as tier:
                tier.directory.clear()
                await tier.store_all(names)
            if not clean:
                (tmp_path / "root" / "snapshot").unlink()
        inspection = LocalInspection.inspect(str(tmp_path / "root"), Access.READ)
        assert inspection is not None
        assert [one for step in inspection.check(False) for one in step.findings] == []
        inspection.close()
        async with support_fs.open_tier(settings) as tier:
            assert len(tier.opened.recovered.keys) == 0
            assert not support_fs.counted(tier)


async def test_evictions_take_the_oldest_of_both(tmp_path: Path) -> None:
    """The blocks of another version count as bytes, and as blocks."""
    root, names = tmp_path / "root", support_fs.keys(300)
    with other_release():
        async with support_files.open_files(support_files.options(root, capacity=4 << 20)) as tier:
            await tier.store(names)
    async with support_files.open_files(support_files.options(root, capacity=4 << 20)) as tier:
        assert all(outcome.ok for outcome in await tier.store(names[:60]))
        assert support_files.disk_bytes(root) <= 4 << 20
        assert support_files.account_is_true(tier)


def test_version_one_keeps_its_names_and_another_says_so() -> None:
    assert block_envelope.version_suffix() == ""
    with other_release(7):
        assert block_envelope.version_suffix() == ".v7"

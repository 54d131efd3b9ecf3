"""A bucket of a real service: what happens when the service fails or changes while a tier is open."""

from __future__ import annotations

import asyncio
import errno
import json
import time

import obstore
import pytest
from click.testing import CliRunner
from support_ceph import KMS_KEY_ID, Bucket, Ceph
from support_objects import Blocks, names
from support_redis import Authority

from kvtier.cli import main
from kvtier.testing import content
from kvtier.testing.conformance import make_keys
from kvtier.types.jobs import BlockStatus, DropReason
from kvtier_remote.objects import options

pytestmark = pytest.mark.remote
NAMES = [*make_keys(3, 0), *make_keys(3, 1)]
SENTINEL = 0x55


@pytest.fixture
def bucket(ceph: Ceph) -> Bucket:
    return Bucket(ceph)


def statuses(outcomes) -> set[str]:
    return {outcome.status for outcome in outcomes.values()}


async def test_a_frozen_service_costs_its_time_and_moves_nothing_late(ceph, bucket, tmp_path):
    async with Blocks(bucket, request_timeout_seconds=2, job_timeout_seconds=5).opened(tmp_path) as driver:
        assert statuses(await driver.store(NAMES)) == {BlockStatus.STORED}
        with ceph.frozen():
            for call in (driver.load, driver.store):
                outcomes = await call(NAMES)
                assert {outcome.errno for outcome in outcomes.values()} == {errno.ETIMEDOUT}
            assert set(await driver.tier.lookup(NAMES)) == {"retry"}
            driver.rows.view[:] = SENTINEL
        await until_answered(driver)
        assert bool((driver.rows.view == SENTINEL).all()), "a row was written after its call had returned"
    async with Blocks(bucket).opened(tmp_path) as driver:  # which has more time
        assert statuses(await driver.load(NAMES)) == {BlockStatus.LOADED}, "a late put wrote other bytes"


async def until_answered(driver) -> None:
    deadline = time.monotonic() + 60
    while "retry" in list(await driver.tier.lookup(NAMES[:1])):
        assert time.monotonic() < deadline, "the tier does not reach its service any more"


async def test_a_gateway_that_was_killed_and_comes_back(ceph, bucket, tmp_path):
    async with Blocks(bucket).opened(tmp_path) as driver:
        assert statuses(await driver.store(NAMES)) == {BlockStatus.STORED}
        ceph.kill()
        try:
            assert statuses(await driver.load(NAMES)) == {BlockStatus.FAILED}
            assert statuses(await driver.store(NAMES)) == {BlockStatus.FAILED}
        finally:
            ceph.start()
        assert statuses(await driver.load(NAMES)) == {BlockStatus.LOADED}


async def test_a_certificate_that_is_trusted_no_more_costs_blocks_and_nothing_else(ceph, bucket, tmp_path):
    """The gateway comes back with a certificate of another authority, and then with its own."""
    own = ceph.certificate
    async with Blocks(bucket, **ceph.over_tls).opened(tmp_path) as driver:
        assert statuses(await driver.store(NAMES)) == {BlockStatus.STORED}
        try:
            ceph.kill()
            ceph.certificate = Authority(tmp_path / "stranger").issue("gateway")
            ceph.start()
            for call in (driver.load, driver.store):
                assert statuses(await call(NAMES)) == {BlockStatus.FAILED}
            assert set(await driver.tier.lookup(NAMES)) == {"retry"}
        finally:
            ceph.kill()
            ceph.certificate = own
            ceph.start()
        assert statuses(await driver.load(NAMES)) == {BlockStatus.LOADED}
        assert statuses(await driver.store(NAMES)) == {BlockStatus.STORED}


@pytest.mark.parametrize(
    ("encryption", "in_clear"), [({}, True), ({"encryption": "aws:kms", "kms_key_id": KMS_KEY_ID}, False)],
    ids=["none", "kms"],
)  # fmt: skip
async def test_what_the_service_is_told_to_encrypt_is_not_in_clear_on_its_disk(
    ceph, bucket, tmp_path, encryption, in_clear
):
    async with Blocks(bucket, **ceph.over_tls, **encryption).opened(tmp_path) as driver:
        assert statuses(await driver.store(NAMES[:1])) == {BlockStatus.STORED}
        assert statuses(await driver.load(NAMES[:1])) == {BlockStatus.LOADED}
        payload = content(NAMES[0], driver.epoch, 300 << 10).tobytes()
    (name,) = names(bucket.store, "kvtier/b/")
    assert (payload in ceph.at_rest(name)) is in_clear


async def test_a_key_in_files_is_read_again_while_the_tier_is_open(ceph, bucket, tmp_path, monkeypatch):
    monkeypatch.setattr(options, "RENEW_SECONDS", 0.2)
    files = {"access_key_file": tmp_path / "key-id", "secret_key_file": tmp_path / "secret"}
    for number in (1, 2):
        ceph.admin("key", "create", "--uid=kv", f"--access-key=AKIDKVTIER{number}", f"--secret=secret{number}")
    for file, text in zip(files.values(), ("AKIDKVTIER1", "secret1"), strict=True):
        file.write_text(text)
        file.chmod(0o600)
    async with Blocks(bucket, credentials={name: str(file) for name, file in files.items()}).opened(tmp_path) as driver:
        assert statuses(await driver.store(NAMES)) == {BlockStatus.STORED}
        ceph.admin("key", "rm", "--uid=kv", "--access-key=AKIDKVTIER1")
        assert {outcome.errno for outcome in (await driver.load(NAMES)).values()} == {errno.EACCES}
        for file, text in zip(files.values(), ("AKIDKVTIER2", "secret2"), strict=True):
            file.write_text(text)
        deadline = time.monotonic() + 60
        while statuses(await driver.load(NAMES)) != {BlockStatus.LOADED}:
            assert time.monotonic() < deadline, "the new key is not used"
        assert statuses(await driver.store(NAMES)) == {BlockStatus.STORED}


async def test_a_bucket_that_is_emptied_while_in_use_is_misses(bucket, tmp_path):
    async with Blocks(bucket).opened(tmp_path) as driver:
        assert statuses(await driver.store(NAMES)) == {BlockStatus.STORED}
        obstore.delete(bucket.store, names(bucket.store))
        assert list(await driver.tier.lookup(NAMES)) == ["miss"] * 6
        assert statuses(await driver.load(NAMES)) == {BlockStatus.MISSING}
        assert statuses(await driver.store(NAMES)) == {BlockStatus.STORED}
        assert statuses(await driver.load(NAMES)) == {BlockStatus.LOADED}


async def test_a_full_quota_drops_and_a_suspended_user_fails(ceph, bucket, tmp_path):
    async with Blocks(bucket).opened(tmp_path) as driver:
        assert statuses(await driver.store(NAMES[:1])) == {BlockStatus.STORED}
        quota = ("quota", "set", "--quota-scope=bucket", f"--bucket={bucket.name}", "--uid=kv", "--max-objects=1")
        ceph.admin(*quota)
        ceph.admin("quota", "enable", "--quota-scope=bucket", f"--bucket={bucket.name}", "--uid=kv")
        outcomes = await driver.store(NAMES[1:])
        assert {outcome.reason for outcome in outcomes.values()} == {DropReason.DISK_FULL}
        ceph.admin("quota", "disable", "--quota-scope=bucket", f"--bucket={bucket.name}", "--uid=kv")
        ceph.admin("user", "suspend", "--uid=kv")
        try:
            for call in (driver.load, driver.store):
                outcomes = await call(NAMES[:1])
                assert {outcome.errno for outcome in outcomes.values()} == {errno.EACCES}
        finally:
            ceph.admin("user", "enable", "--uid=kv")
        assert statuses(await driver.load(NAMES[:1])) == {BlockStatus.LOADED}


async def test_a_block_that_is_loaded_in_the_second_half_of_its_life_starts_anew(bucket, tmp_path):
    """The second host's clock is two days ahead; the rule is three days."""
    suite, later = Blocks(bucket, renew=True), Blocks(bucket, renew=True)
    later.wall_ns = lambda: time.time_ns() + 2 * 86_400 * 10**9
    async with suite.opened(tmp_path) as driver:
        assert statuses(await driver.store(NAMES)) == {BlockStatus.STORED}
        assert statuses(await driver.load(NAMES)) == {BlockStatus.LOADED}
        assert driver.tier.counters["renewed"] == 0
    name = names(bucket.store, "kvtier/b")[0]
    written = obstore.head(bucket.store, name)["last_modified"]
    await asyncio.sleep(1.1)  # the service gives whole seconds
    async with later.opened(tmp_path) as driver:
        assert statuses(await driver.load(NAMES[:1])) == {BlockStatus.LOADED}
        assert statuses(await driver.load(NAMES[1:])) == {BlockStatus.LOADED}
    assert driver.tier.counters["renewed"] >= 4
    assert driver.tier.counters["renew.failed"] == 0
    renewed = [obstore.head(bucket.store, name)["last_modified"] > written for name in names(bucket.store, "kvtier/b")]
    assert sum(renewed) == driver.tier.counters["renewed"]
    async with suite.opened(tmp_path) as driver:
        assert statuses(await driver.load(NAMES)) == {BlockStatus.LOADED}


def test_the_tools_read_and_prune_a_bucket(ceph, bucket, tmp_path):
    async def work() -> None:
        async with Blocks(bucket).opened(tmp_path) as driver:
            await driver.store(NAMES)
            await driver.tier.reset(1)
            driver.epoch = 1
            await driver.store(NAMES[:4])

    asyncio.run(work())
    for lease in names(bucket.store, "kvtier/l"):  # which expires in an hour
        bucket.store.delete(lease)
    keys = ", ".join(
        f"{name}_file: {ceph.folder / file}" for name, file in (("access_key", "key-id"), ("secret_key", "secret"))
    )
    where = [f"s3://{bucket.name}/kvtier", "-o", f"endpoint={ceph.endpoint}", "-o", "allow_http=true"]
    where += ["-o", "region=us-east-1", "-o", f"credentials={{{keys}}}", "--json"]

    def tool(command: str, *more: str) -> dict[str, object]:
        result = CliRunner().invoke(main, [command, *where, *more])
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)

    assert sorted(block["state"] for block in tool("ls", "--all")["blocks"]) == ["current"] * 4 + ["old"] * 6
    rows = {row["epoch"]: row for row in tool("du", "--by", "epoch")["rows"]}
    assert (rows[0]["leftover_blocks"], rows[1]["blocks"]) == (6, 4)
    assert tool("du")["rows"][0]["model"] == "conformance"
    assert tool("fsck")["whole"] == 4
    assert tool("gc", "--old")["dropped"][0]["blocks"] == 6
    assert tool("gc", "--older-than", "1d")["dropped"] == []
    assert len(names(bucket.store, "kvtier/b")) == 4
    namespace = str(tool("du")["rows"][0]["namespace"])
    assert tool("gc", "--namespace", namespace)["dropped"][0]["blocks"] == 4
    assert names(bucket.store, "kvtier/b") == names(bucket.store, "kvtier/manifests") == []
    assert len(names(bucket.store, "kvtier/m")) == 1

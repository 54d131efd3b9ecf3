"""The tools on object stores: by names alone, and what a load would refuse is found."""

from __future__ import annotations

import time
from hashlib import sha256
from pathlib import Path

import pytest
from support_objects import Blocks, Folder, names, read, write
from support_remote_blocks import NAMES, store_epochs
from support_tools import refusal

from kvtier.tier.inspection import BlockState
from kvtier_remote.inspect import RemoteInspection
from kvtier_remote.objects.listing import AZURE, GCS, S3, ObjectListing


@pytest.fixture
def bucket(tmp_path: Path) -> Folder:
    """A bucket with 5 blocks of an epoch that was ended by a reset, and 5 of the one after. No process is left."""
    bucket = Folder(tmp_path / "bucket")
    store_epochs(Blocks(bucket), epochs=2)
    for lease in names(bucket.store, "kvtier/l"):
        bucket.store.delete(lease)
    return bucket


def opened(bucket: Folder) -> RemoteInspection:
    tier = bucket.tier()
    return RemoteInspection(ObjectListing(tier.options, tier._connect()))


def found(store: RemoteInspection, repair: bool = False) -> list[tuple[str, str, bool]]:
    """What a check finds, but for leftovers of an older epoch."""
    steps = list(store.check(repair))
    store.close()
    findings = [finding for step in steps for finding in step.findings if finding.kind != "old"]
    return sorted((finding.kind, finding.reason, finding.repaired) for finding in findings)


def test_blocks_are_listed_by_their_names(bucket: Folder) -> None:
    store = opened(bucket)
    blocks = [block for step in store.blocks() for block in step.blocks]
    assert {block.key for block in blocks} == {sha256(key).digest()[:20] for key in NAMES}
    assert sorted(block.state for block in blocks) == [BlockState.CURRENT] * 5 + [BlockState.OLD] * 5
    assert {block.epoch for block in blocks if block.state is BlockState.CURRENT} == {1}
    assert all(abs((block.stored_at or 0) - time.time()) < 600 for block in blocks)
    (namespace,) = store.about.namespaces
    assert (namespace.digest, namespace.epoch) == (Blocks(bucket).namespace().digest()[:8], 1)
    assert (namespace.model, namespace.tag) == ("conformance", "")
    store.close()


def test_a_namespace_without_blocks_loses_its_manifest(bucket: Folder) -> None:
    digits = Blocks(bucket).namespace().digest()[:8].hex()
    assert names(bucket.store, "kvtier/manifests") == [f"kvtier/manifests/{digits}.json"]
    store = opened(bucket)
    list(store.drop(lambda block: block.state is BlockState.OLD))
    assert len(names(bucket.store, "kvtier/manifests")) == 1
    list(store.drop(lambda block: True))
    assert names(bucket.store, "kvtier/manifests") == []
    store.close()


def test_chosen_blocks_are_removed_and_nothing_else(bucket: Folder) -> None:
    store = opened(bucket)
    dropped = [block for step in store.drop(lambda block: block.state is BlockState.OLD) for block in step.blocks]
    assert len(dropped) == 5
    assert len(names(bucket.store, "kvtier/b")) == 5
    assert len(names(bucket.store, "kvtier/m")) == 1
    assert all(step.whole == len(step.findings) == 0 or not step.findings for step in store.check(repair=False))
    store.close()


def test_without_a_marker_nothing_counts(bucket: Folder) -> None:
    for path in names(bucket.store, "kvtier/m"):
        bucket.store.delete(path)
    store = opened(bucket)
    assert {block.state for step in store.blocks() for block in step.blocks} == {BlockState.ORPHANED}
    store.close()


def test_damage_is_found_and_removed_on_request(bucket: Folder) -> None:
    assert found(opened(bucket)) == []
    current = [path for path in names(bucket.store, "kvtier/b") if "00000001." in path]
    values = [bytearray(read(bucket.store, path)) for path in current]
    values[0][-1] ^= 1
    values[1][40] ^= 1
    values[2] += b"more"
    for path, value in zip(current, [*values[:3], values[4], b""], strict=True):
        write(bucket.store, path, bytes(value))
    write(bucket.store, "kvtier/b/ab/anything", b"not ours")
    damage = ["header_checksum", "key", "payload", "slot_bytes", "version"]
    other = ("unknown_file", "name", False)
    assert found(opened(bucket)) == [*(("corrupt", reason, False) for reason in damage), other]
    assert found(opened(bucket), repair=True) == [*(("corrupt", reason, True) for reason in damage), other]
    assert found(opened(bucket)) == [other]


@pytest.mark.parametrize(
    ("inspector", "address", "options"),
    [
        (S3, "s3://kv-cache/team-a", {"bucket": "kv-cache", "prefix": "team-a"}),
        (S3, "s3://kv-cache", {"bucket": "kv-cache"}),
        (GCS, "gs://kv-cache/team-a", {"bucket": "kv-cache", "prefix": "team-a"}),
        (AZURE, "az://kv-cache/team-a", {"container": "kv-cache", "prefix": "team-a"}),
        (S3, "gs://kv-cache", None),
    ],
)
def test_an_address_names_a_bucket_and_a_prefix(inspector, address, options) -> None:
    given = inspector.address_options(address)
    patient = {"allow_unbounded": True, "request_timeout_seconds": 20, "job_timeout_seconds": 60}
    assert given == (None if options is None else options | patient)


def test_what_cannot_be_read_is_one_line_that_repeats_no_secret() -> None:
    assert "holds no user and no password" in refusal("ls", "s3://AK:sesame@kv-cache/a")
    assert "write allow_http: true" in refusal("ls", "s3://kv-cache/a", "-o", "endpoint=http://127.0.0.1:1")
    assert "account: is required" in refusal("du", "az://kv-cache/a")
    where = ("s3://kv-cache/a", "-o", "endpoint=http://127.0.0.1:1", "-o", "allow_http=true", "-o", "region=eu-1")
    line = refusal("ls", *where, "-o", "request_timeout_seconds=2")
    assert "s3://kv-cache/a: the store does not answer" in line

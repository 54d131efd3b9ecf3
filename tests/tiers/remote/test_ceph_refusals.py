"""What keeps the tier `s3` from opening on a real service: each mistake is one line with its key, from `kvtier check`
as well."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support_ceph import KMS_KEY_ID, Bucket, Ceph
from support_checks import check_refuses, checked, open_refuses, private_file
from support_objects import Blocks, names
from support_redis import Authority

from kvtier.testing.conformance import make_keys

pytestmark = pytest.mark.remote
BOUND = {"allow_unbounded": False, "write_bytes_per_day": "1GiB", "expire_days": 3}
OTHER, OTHER_SECRET = "AKIDOTHER", "hunter2"
RIGHTS = ("s3:ListBucket", "s3:GetObject", "s3:PutObject", "s3:DeleteObject")
"""As docs/remote.md names them."""
LACKING = {
    "may not list": ("s3:ListBucket",),
    "may not write": ("s3:PutObject", "s3:DeleteObject"),
    "may not read": ("s3:GetObject",),
    "may not remove": ("s3:DeleteObject",),
}
"""What another user of the bucket may not do."""


class Refusal(NamedTuple):
    """Changes of the options, what the bucket is made with, the key that the line must name, and how a check without a
    probe ends."""

    changes: dict[str, Any]
    bucket: dict[str, Any]
    key: str
    unprobed: int = 0


def keys_of(ceph: Ceph, key: str, secret: str) -> dict[str, Any]:
    return {"credentials": {"access_key_file": str(ceph.folder / key), "secret_key_file": str(ceph.folder / secret)}}


def refusals(ceph: Ceph) -> dict[str, Refusal]:
    stranger = {"ca_file": str(ceph.folder / "stranger" / "ca.crt")}
    other = keys_of(ceph, "other-id", "wrong")
    unknown_key = {"encryption": "aws:kms", "kms_key_id": "another-key"}
    found = {
        "wrong secret": Refusal(keys_of(ceph, "key-id", "wrong"), {}, "credentials"),
        "no such file": Refusal(keys_of(ceph, "key-id", "absent"), {}, "credentials.secret_key_file"),
        "no such bucket": Refusal({"bucket": "nobody-has-it"}, {}, "bucket"),
        "closed port": Refusal({"endpoint": "http://127.0.0.1:1"}, {}, "endpoint"),
        "unknown host": Refusal({"endpoint": "http://kvtier.invalid:1"}, {}, "endpoint"),
        "no TLS": Refusal({"endpoint": ceph.endpoint.replace("http:", "https:")}, {}, "endpoint"),
        "untrusted certificate": Refusal(ceph.over_tls | {"ca_file": None}, {}, "ca_file"),
        "another authority": Refusal(ceph.over_tls | stranger, {}, "ca_file"),
        "no rule": Refusal({}, {"rule": ""}, "expire_days"),
        "another rule": Refusal({}, {"rule": "other/b/"}, "expire_days"),
        "a longer rule": Refusal({}, {"days": 4}, "expire_days"),
        "a rule for markers": Refusal({}, {"rule": "kvtier/"}, "prefix"),
        "no budget": Refusal({"write_bytes_per_day": None}, {}, "write_bytes_per_day", 2),
        "unknown KMS key": Refusal(ceph.over_tls | unknown_key, {}, "kms_key_id"),
        "encryption in clear": Refusal({"encryption": "AES256"}, {}, "encryption"),
    }
    return found | {
        kind: Refusal(other | {"allow_unbounded": True}, {"denied": lacks}, "credentials")
        for kind, lacks in LACKING.items()
    }


KINDS = [
    *("wrong secret", "no such file", "no such bucket", "closed port", "unknown host", "no TLS"),
    *("untrusted certificate", "another authority", "no rule", "another rule", "a longer rule", "a rule for markers"),
    *("no budget", "unknown KMS key", "encryption in clear", *LACKING),
]


@pytest.fixture(scope="module")
def ceph(ceph: Ceph) -> Ceph:
    """The cluster of this process; beside its own credentials a wrong secret, another user and a foreign authority."""
    private_file(ceph.folder / "wrong", OTHER_SECRET)
    private_file(ceph.folder / "other-id", OTHER)
    ceph.admin("user", "create", "--uid=other", "--display-name=o", f"--access-key={OTHER}", f"--secret={OTHER_SECRET}")
    Authority(ceph.folder / "stranger")
    return ceph


def bucket_of(ceph: Ceph, denied: tuple[str, ...] = (), **made: Any) -> Bucket:
    """A new bucket, in which another user may do what a tier does, but for what is `denied`."""
    bucket = Bucket(ceph, **made)
    places = [f"arn:aws:s3:::{bucket.name}{below}" for below in ("", "/*")]
    who = {"Principal": {"AWS": ["arn:aws:iam:::user/other"]}, "Resource": places}
    rules = [who | {"Effect": "Allow", "Action": list(RIGHTS)}]
    if denied:  # who has written an object may read it unless that is denied
        rules.append(who | {"Effect": "Deny", "Action": list(denied)})
    bucket.ask("PUT", "policy", json.dumps({"Version": "2012-10-17", "Statement": rules}).encode())
    return bucket


def left_nothing(bucket: Bucket, kind: str) -> bool:
    """Whether no more is in the bucket than what cannot be removed."""
    found = names(bucket.store)
    if kind == "may not remove":
        return len(found) == 1 and found[0].startswith("kvtier/b/probe.")
    return not found


def test_every_kind_is_tried(ceph):
    assert [*refusals(ceph)] == KINDS


@pytest.mark.parametrize("kind", KINDS)
async def test_what_keeps_a_tier_from_opening_is_one_line_with_its_key(ceph, tmp_path, kind):
    changes, made, key, _ = refusals(ceph)[kind]
    bucket = bucket_of(ceph, **made)
    await open_refuses(Blocks(bucket, **(BOUND | changes)), tmp_path, key)
    assert left_nothing(bucket, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_a_check_ends_with_2_and_that_line(ceph, tmp_path, kind):
    changes, made, key, unprobed = refusals(ceph)[kind]
    bucket = bucket_of(ceph, **made)
    check_refuses(tmp_path, bucket.options(**(BOUND | changes)), key, unprobed=unprobed)
    assert left_nothing(bucket, kind)


def test_a_user_with_the_documented_rights_opens_and_a_check_leaves_nothing(ceph, tmp_path):
    bucket = bucket_of(ceph)
    other = keys_of(ceph, "other-id", "wrong")
    result = checked(tmp_path, bucket.options(**other))
    assert result.exit_code == 0, result.output
    assert names(bucket.store) == []
    asyncio.run(works(Blocks(bucket, **other), tmp_path))


def test_a_known_key_passes_the_check(ceph, tmp_path):
    bucket = Bucket(ceph)
    known = {"encryption": "aws:kms", "kms_key_id": KMS_KEY_ID}
    assert checked(tmp_path, bucket.options(**ceph.over_tls, **known)).exit_code == 0
    assert names(bucket.store) == []


async def works(suite: Blocks, folder: Path) -> None:
    keys = make_keys(2, 1)
    async with suite.opened(folder) as driver:
        assert all(outcome.ok for outcome in (await driver.store(keys)).values())
        assert all(outcome.ok for outcome in (await driver.load(keys)).values())

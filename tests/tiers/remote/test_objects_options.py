"""Options of object stores, their bounds and their lifecycle rules: checked without the library or a server."""

from __future__ import annotations

import subprocess
import sys

import pytest
from pydantic import ValidationError
from support_checks import private_file
from support_libraries import planned_without
from support_stack import PLAIN

from kvtier.config import build_tiers, parse_stack
from kvtier.config.plan import plan_stack
from kvtier.errors import ConfigError
from kvtier.types.geometry import Geometry
from kvtier_remote import AzureOptions, GCSOptions, S3Options
from kvtier_remote.objects.bound import Rule, check_rules, cost_notes, facts_of, parsed, require

BOUND = {"write_bytes_per_day": "1TiB", "expire_days": 3}


def s3(**given: object) -> S3Options:
    return S3Options.model_validate({"type": "s3", "bucket": "kv-cache"} | BOUND | given)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"secret": "hunter2"}, "a stack file holds no secret"),
        ({"bucket": "a/b"}, "pattern"),
        ({"prefix": ".."}, "is no name in a bucket"),
        ({"prefix": "a/b"}, "pattern"),
        ({"endpoint": "rgw:7480"}, "is no endpoint"),
        ({"endpoint": "https://user:hunter2@rgw"}, "is no endpoint"),
        ({"endpoint": "https://rgw?x=y"}, "is no endpoint"),
        ({"endpoint": "https://rgw:99999"}, "is no endpoint"),
        ({"endpoint": "https://rgw:0"}, "is no endpoint"),
        ({"endpoint": "https://[::::]"}, "is no endpoint"),
        ({"endpoint": "http://rgw:7480"}, "write allow_http: true"),
        ({"credentials": {"access_key_file": "/k"}}, "secret_key_file"),
        ({"credentials": {"access_key_file": "k", "secret_key_file": "/s"}}, "is not an absolute path"),
        ({"credentials": "hunter2"}, "default"),
        ({"encryption": "rot13"}, "AES256"),
        ({"kms_key_id": "key"}, "goes with encryption"),
        ({"renew": True, "expire_days": None}, "give expire_days"),
        ({"expire_days": 0}, "greater than or equal to 1"),
        ({"requests": 0}, "greater than or equal to 1"),
        ({"request_timeout_seconds": 5}, "must be less than job_timeout_seconds"),
    ],
)
def test_what_is_wrong_is_refused_with_what_to_do(given, reason):
    with pytest.raises(ValidationError, match=reason):
        s3(**given)


def test_what_goes_to_the_library_comes_from_files_of_ours(tmp_path):
    for name, text in (("id", "AKID\n"), ("secret", "hunter2\n"), ("account", '{"type": "service_account"}')):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o600)
    keys = {"access_key_file": f"{tmp_path}/id", "secret_key_file": f"{tmp_path}/secret"}
    given = s3(credentials=keys, encryption="aws:kms", kms_key_id="k", region="eu-central-1").arguments()
    key = given["credential_provider"]()
    assert (key["access_key_id"], key["secret_access_key"]) == ("AKID", "hunter2")
    assert (given["server_side_encryption"], given["sse_kms_key_id"]) == ("aws:kms", "k")
    assert given["unsigned_payload"] is True
    gcs = GCSOptions.model_validate(
        {"bucket": "kv-cache", "credentials": {"service_account_file": f"{tmp_path}/account"}}
    )
    assert gcs.arguments() == {"bucket": "kv-cache", "service_account_key": '{"type": "service_account"}'}
    azure = AzureOptions.model_validate(
        {"account": "kvcache", "container": "kv-cache", "credentials": {"account_key_file": f"{tmp_path}/secret"}}
    )
    assert azure.arguments()["credential_provider"]()["access_key"] == "hunter2"
    (tmp_path / "secret").chmod(0o604)
    with pytest.raises(ConfigError, match=r"credentials\.secret_key_file: .*chmod o-rwx"):
        s3(credentials=keys).arguments()
    with pytest.raises(ConfigError, match=r"ca_file: .*No such file"):
        s3(ca_file=str(tmp_path / "absent")).authorities()
    assert "credential_provider" not in s3().arguments(), "the library's own search"


@pytest.mark.parametrize("held", ["AKID\nsecret", "AK\0ID", "AKID\r\nx"])
def test_an_access_key_of_more_than_a_line_is_refused(tmp_path, held):
    """The library panics over it."""
    good, bad = private_file(tmp_path / "good", "AKID"), private_file(tmp_path / "bad", held)
    for files in ((bad, good), (good, bad)):
        with pytest.raises(ConfigError, match="more than one line") as caught:
            s3(credentials=dict(zip(("access_key_file", "secret_key_file"), files, strict=True))).arguments()
        assert held not in str(caught.value)


@pytest.mark.parametrize("held", ["", "AKID", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"])
def test_a_file_of_authorities_without_any_is_refused(tmp_path, held):
    (tmp_path / "ca").write_text(held)
    with pytest.raises(ConfigError, match="holds no certificates") as caught:
        s3(ca_file=str(tmp_path / "ca")).authorities()
    assert caught.value.path == "ca_file"


@pytest.mark.parametrize("key", ["write_bytes_per_day", "expire_days"])
def test_a_store_without_a_bound_is_refused_unless_the_file_says_so(key):
    with pytest.raises(ConfigError) as caught:
        facts_of(s3(**{key: None}))
    assert caught.value.path == key
    facts = facts_of(s3(**{key: None}, allow_unbounded=True))
    assert "nothing bounds" in facts.notes[0]


def test_the_bound_is_what_all_processes_write_while_a_block_lives():
    facts = facts_of(s3(hosts=8))
    assert facts.capacity_bytes == 8 * (1 << 40) * 4, "it lives until the end of the day on which it is three days old"
    assert facts.notes == ("8 x 1 TiB a day x (3 + 1) days = 32 TiB at most in the store",)


def test_requests_and_dollars_are_said():
    said = cost_notes(s3(), Geometry(PLAIN, 4096))
    size = Geometry(PLAIN, 4096).aligned_bytes(0)
    requests = (1 << 30) // size
    assert f"1 GiB is {requests:,} requests" in said[0]
    assert f"{requests * 5e-6:.4f} $ to write, {requests * 0.4e-6:.4f} $ to read" in said[0]
    assert f"{1024 * requests:,} requests and {1024 * requests * 5e-6:.2f} $ a day" in said[1]


RULES = """<?xml version="1.0"?>
<LifecycleConfiguration xmlns="http://s3.amazonaws.com/doc/2006-03-01/">
  <Rule><Filter><Prefix>one/b/</Prefix></Filter><Status>Enabled</Status><Expiration><Days>3</Days></Expiration></Rule>
  <Rule><Prefix>old/b/</Prefix><Status>Enabled</Status><Expiration><Days>4</Days></Expiration></Rule>
  <Rule><Filter/><Status>Disabled</Status><Expiration><Days>1</Days></Expiration></Rule>
  <Rule><Filter><And><Prefix>tagged/</Prefix><Tag><Key>k</Key><Value>v</Value></Tag></And></Filter>
    <Status>Enabled</Status><Expiration><Days>1</Days></Expiration></Rule>
  <Rule><Filter><Prefix>one/</Prefix></Filter><Status>Enabled</Status>
    <AbortIncompleteMultipartUpload><DaysAfterInitiation>1</DaysAfterInitiation></AbortIncompleteMultipartUpload></Rule>
</LifecycleConfiguration>"""


def test_the_rules_that_count_remove_by_prefix_and_age():
    assert list(parsed(RULES.encode())) == [Rule("one/b/", 3), Rule("old/b/", 4)]


@pytest.mark.parametrize(
    ("rules", "key", "reason"),
    [
        ([], "expire_days", "no rule of the bucket removes kvtier/b/"),
        ([Rule("other/b/", 1)], "expire_days", "no rule of the bucket removes kvtier/b/"),
        ([Rule("kvtier/b/a", 1)], "expire_days", "no rule of the bucket removes kvtier/b/"),
        ([Rule("kvtier/b/", 4)], "expire_days", "after 4 days"),
        ([Rule("kvtier/b/", 3), Rule("kvtier/", 9)], "prefix", "resets would be forgotten"),
        ([Rule("", 3)], "prefix", "resets would be forgotten"),
    ],
)
def test_rules_that_do_not_bound_the_store_or_remove_markers_are_refused(rules, key, reason):
    with pytest.raises(ConfigError, match=reason) as caught:
        require(s3(), rules)
    assert caught.value.path == key


def test_rules_that_bound_the_store_pass():
    for rules in ([Rule("kvtier/b/", 3)], [Rule("kvtier/b", 9), Rule("kvtier/b/", 1)]):
        require(s3(), rules)
    require(s3(allow_unbounded=True), [])


def test_rules_of_other_services_are_not_read():
    options = GCSOptions.model_validate({"bucket": "kv-cache"})
    assert "was not read" in check_rules(options)[0]


def test_without_the_library_a_stack_file_is_valid_and_opening_says_what_to_install():
    """In a process of its own, because others have imported it here."""
    unprobed, probed = planned_without(
        "obstore", "{type: s3, bucket: kv-cache, write_bytes_per_day: 1TiB, expire_days: 3}"
    )
    install = "needs the package obstore; pip install 'kvtier[objects]'"
    assert (unprobed.notes[-1:], unprobed.problems) == ((f"this tier {install}",), [])
    assert (probed.notes[-1:], probed.problems) == ((), [f"tiers[2].type: {install}"])


def test_the_library_is_imported_by_nothing_but_opening():
    code = "import sys, kvtier_remote; sys.exit('obstore' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120, check=False).returncode == 0


def test_a_plan_without_a_probe_needs_no_service_and_names_what_is_missing():
    text = "tiers: [{type: gpu}, {type: cpu, cpu_bytes_to_use: 1GiB}, {type: s3, bucket: kv-cache, %s}]"
    plan, problems = plan_stack(build_tiers(parse_stack(text % "write_bytes_per_day: 1TiB, expire_days: 2")), PLAIN)
    assert (plan.tiers[2].capacity_bytes, problems) == (3 << 40, [])
    _, problems = plan_stack(build_tiers(parse_stack(text % "expire_days: 2")), PLAIN)
    assert [problem.path for problem in problems] == ["tiers[2].write_bytes_per_day"]

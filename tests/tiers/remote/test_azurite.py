"""A container of Azure's emulator: what keeps a tier from opening, and renewal."""

from __future__ import annotations

import errno
import time
from pathlib import Path

import pytest
from support_azurite import KEY, Azurite, Container
from support_checks import check_refuses, checked, open_refuses, private_file
from support_objects import Blocks, names

from kvtier.testing.conformance import make_keys
from kvtier_remote.objects import options

pytestmark = [pytest.mark.remote, pytest.mark.azure]
NAMES = [*make_keys(2, 0), *make_keys(2, 1)]


REFUSALS: dict[str, tuple[str, dict[str, object], str, int]] = {
    "wrong key": ("AAAA" + KEY[4:], {}, "credentials", 0),
    "no key": ("no base64", {}, "credentials", 0),
    "no such file": (KEY, {"credentials": {"account_key_file": "/absent"}}, "credentials.account_key_file", 0),
    "no such container": (KEY, {"container": "nothing-here"}, "container", 0),
    "closed port": (KEY, {"endpoint": "http://127.0.0.1:1/devstoreaccount1"}, "endpoint", 0),
    "unknown host": (KEY, {"endpoint": "http://kvtier.invalid:1/devstoreaccount1"}, "endpoint", 0),
    "no bound": (KEY, {"allow_unbounded": False}, "write_bytes_per_day", 2),
}
"""By what is wrong: the key in the file, changes of the options, the key that the line must name, and how a check
without a probe ends."""


def refused(azurite: Azurite, folder: Path, kind: str) -> tuple[Container, dict[str, object]]:
    secret, changes, _, _ = REFUSALS[kind]
    keys = {"account_key_file": private_file(folder / "key", secret)}
    return Container(azurite), {"credentials": keys} | changes


@pytest.mark.parametrize("kind", REFUSALS)
async def test_what_keeps_a_tier_from_opening_is_one_line_with_its_key(azurite, tmp_path, kind):
    container, changes = refused(azurite, tmp_path, kind)
    secret, _, key, _ = REFUSALS[kind]
    assert secret not in await open_refuses(Blocks(container, **changes), tmp_path, key)
    assert names(container.store) == []


@pytest.mark.parametrize("kind", REFUSALS)
def test_a_check_ends_with_2_and_that_line(azurite, tmp_path, kind):
    container, changes = refused(azurite, tmp_path, kind)
    secret, _, key, unprobed = REFUSALS[kind]
    assert secret not in check_refuses(tmp_path, container.options(**changes), key, unprobed=unprobed)
    assert names(container.store) == []


def test_a_right_key_passes_the_check_which_leaves_nothing(azurite, tmp_path):
    container = Container(azurite)
    assert checked(tmp_path, container.options()).exit_code == 0
    assert names(container.store) == []


async def test_an_old_block_is_copied_onto_itself(azurite, tmp_path):
    container = Container(azurite)
    suite, later = Blocks(container, expire_days=3, renew=True), Blocks(container, expire_days=3, renew=True)
    later.wall_ns = lambda: time.time_ns() + 2 * 86_400 * 10**9
    async with suite.opened(tmp_path) as driver:
        assert all(outcome.ok for outcome in (await driver.store(NAMES)).values())
    async with later.opened(tmp_path) as driver:
        assert all(outcome.ok for outcome in (await driver.load(NAMES)).values())
    assert (driver.tier.counters["renewed"], driver.tier.counters["renew.failed"]) == (4, 0)
    async with suite.opened(tmp_path) as driver:
        assert all(outcome.ok for outcome in (await driver.load(NAMES)).values())


async def test_a_key_in_a_file_is_read_again_while_the_tier_is_open(azurite, tmp_path, monkeypatch):
    monkeypatch.setattr(options, "RENEW_SECONDS", 0.2)
    file = tmp_path / "key"
    keys = {"account_key_file": private_file(file, KEY)}
    async with Blocks(Container(azurite), credentials=keys).opened(tmp_path) as driver:
        assert all(outcome.ok for outcome in (await driver.store(NAMES)).values())
        for key, errors in (("AAAA" + KEY[4:], {errno.EACCES}), (KEY, {0})):
            file.write_text(key)
            deadline = time.monotonic() + 60
            while {outcome.errno for outcome in (await driver.load(NAMES)).values()} != errors:
                assert time.monotonic() < deadline, "the other key is not used"

"""A container of Azure's emulator: what keeps a tier from opening, and renewal."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from support_azurite import KEY, Azurite, Container, azurite
from support_objects import Blocks

from kvtier.errors import ConfigError
from kvtier.testing.conformance import make_keys

pytestmark = [pytest.mark.remote, pytest.mark.azure]
NAMES = [*make_keys(2, 0), *make_keys(2, 1)]


@pytest.fixture(scope="module")
def service() -> Iterator[Azurite]:
    with azurite() as one:
        yield one


REFUSALS = {
    "wrong key": ("AAAA" + KEY[4:], {}, "credentials"),
    "no key": ("no base64", {}, "credentials"),
    "no such container": (KEY, {"container": "nothing-here"}, "container"),
    "closed port": (KEY, {"endpoint": "http://127.0.0.1:1/devstoreaccount1"}, "endpoint"),
    "no bound": (KEY, {"allow_unbounded": False}, "write_bytes_per_day"),
}


@pytest.mark.parametrize("kind", REFUSALS)
async def test_what_keeps_a_tier_from_opening_is_one_line_with_its_key(service, tmp_path, kind):
    secret, changes, key = REFUSALS[kind]
    file = tmp_path / "key"
    file.write_text(secret)
    file.chmod(0o600)
    suite = Blocks(Container(service), credentials={"account_key_file": str(file)}, **changes)
    with pytest.raises(ConfigError) as caught:
        async with suite.opened(tmp_path):
            pass
    assert caught.value.path == key
    assert "\n" not in str(caught.value)
    assert secret not in str(caught.value)


async def test_an_old_block_is_copied_onto_itself(service, tmp_path):
    container = Container(service)
    suite, later = Blocks(container, expire_days=3, renew=True), Blocks(container, expire_days=3, renew=True)
    later.wall_ns = lambda: time.time_ns() + 2 * 86_400 * 10**9
    async with suite.opened(tmp_path) as driver:
        assert all(outcome.ok for outcome in (await driver.store(NAMES)).values())
    async with later.opened(tmp_path) as driver:
        assert all(outcome.ok for outcome in (await driver.load(NAMES)).values())
    assert (driver.tier.counters["renewed"], driver.tier.counters["renew.failed"]) == (4, 0)
    async with suite.opened(tmp_path) as driver:
        assert all(outcome.ok for outcome in (await driver.load(NAMES)).values())

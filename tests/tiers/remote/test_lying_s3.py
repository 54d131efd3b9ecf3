"""An S3 service that lies: each opening and call ends in its time, with a typed error or an outcome."""

from __future__ import annotations

import asyncio
import errno
import os
import ssl
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from support_counts import some
from support_lies import OBJECT_LIES, ZEROS, object_without_end
from support_lying_http import BUCKET, KEYS, Asked, LyingS3, chunked, lying_s3, raw_server, reply
from support_lying_life import LIFE_SECONDS, MEMORY_BYTES, life_over
from support_objects import Blocks

from kvtier.errors import ConfigError, ResourceError
from kvtier.testing.conformance import make_keys
from kvtier_remote.bounded_http import get
from kvtier_remote.objects.library import errno_of
from kvtier_remote.objects.tier import S3Backend

NAMES = [*make_keys(3, 0), *make_keys(3, 1)]
SHORT = {"request_timeout_seconds": 1.0, "job_timeout_seconds": 4.0}
PATIENT = {"request_timeout_seconds": 2.0, "job_timeout_seconds": 8.0}
"""Where a store has to succeed, on a busy machine too."""
HEAVY = ("markers without an end", "an object without an end")


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def service() -> Iterator[LyingS3]:
    with lying_s3() as one:
        yield one


class Bucket:
    """Makes tiers there."""

    def __init__(self, service: LyingS3) -> None:
        self.service = service

    def tier(self, **changes: Any) -> S3Backend:
        return S3Backend(self.service.options(**changes))


async def life(service: LyingS3, folder: Path, **changes: Any) -> tuple[list[str], dict[str, int]]:
    """What became of an opening, a store, a load, a lookup and a reset, and what was counted."""
    calls: list[str] = []
    try:
        async with Blocks(Bucket(service), **changes).opened(folder) as driver:
            calls.append("opened")
            for call in (driver.store, driver.load):
                calls.append(" ".join(sorted({str(one.status) for one in (await call(NAMES)).values()})))
            calls.append(" ".join(sorted({str(found) for found in await driver.tier.lookup(NAMES)})))
            await driver.tier.reset(1)
            calls.append("reset")
            return calls, dict(driver.tier.counters)
    except (ConfigError, ResourceError) as error:
        return [*calls, type(error).__name__], {}


GOES_ON = {
    "an object without an end": ["opened", "stored", "corrupt", "miss", "reset"],
    "a size of 2^70": ["opened", "stored", "loaded", "retry", "reset"],
    "a block of the year 99999": ["opened", "stored", "loaded", "retry", "reset"],
    **{lie: ["opened", "stored", "loaded", "hit", "reset"] for lie in OBJECT_LIES if "lifecycle" in lie},
}


async def test_an_honest_service_serves(service, tmp_path):
    calls, counted = await life(service, tmp_path)
    assert calls == ["opened", "stored", "loaded", "hit", "reset"]
    assert set(counted) == {"requested", "lookup.failed"}


@pytest.mark.parametrize("lie", some(OBJECT_LIES, 5))
async def test_whatever_a_service_says_ends_in_time_and_in_typed_errors(service, tmp_path, lie):
    service.lie = OBJECT_LIES[lie]()
    begun = time.monotonic()
    timeouts = PATIENT if lie in GOES_ON else SHORT
    calls, counted = await life(service, tmp_path, **timeouts)
    assert time.monotonic() - begun < LIFE_SECONDS
    if lie in GOES_ON:
        assert calls == GOES_ON[lie]
        assert "defect" not in counted
    else:
        assert calls[-1] in ("ConfigError", "ResourceError")


@pytest.mark.parametrize("lie", HEAVY)
def test_what_has_no_end_takes_no_memory(service, lie):
    honest = life_over(service.options())
    assert honest.calls == ["opened", "stored", "loaded", "hit", "reset"]
    service.lie = OBJECT_LIES[lie]()
    ended = life_over(service.options())
    assert ended.seconds < LIFE_SECONDS
    assert ended.peak_bytes < honest.peak_bytes + MEMORY_BYTES


async def test_an_object_that_is_too_long_is_read_no_further(service, tmp_path):
    """The library reads a body to its end; here that is given up after a byte too many."""
    async with Blocks(Bucket(service)).opened(tmp_path) as driver:
        await driver.store(NAMES)
        sent = Sent()
        service.lie = lambda asked: sent.without_end(asked) if asked.method == "GET" and "/b/" in asked.name else None
        begun = time.monotonic()
        assert {str(one.status) for one in (await driver.load(NAMES[3:4])).values()} == {"corrupt"}
        assert time.monotonic() - begun < driver.tier.options.request_timeout_seconds / 2
        await asyncio.wait_for(sent.ended.wait(), LIFE_SECONDS)


class Sent:
    """A value without an end; `ended` once its connection has."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.ended = asyncio.Event()

    def without_end(self, asked: Asked) -> Iterator[bytes]:
        try:
            yield from object_without_end(asked)
        finally:
            self._loop.call_soon_threadsafe(self.ended.set)


# ---- reasons that become labels of metrics


@pytest.mark.parametrize("text", ["Os { code: 98765, kind", "Os { code: 99999999999999999999", "status code: 777"])
def test_numbers_of_a_text_are_errnos_or_none(text):
    assert errno_of(OSError(text)) == errno.EIO


def test_a_number_that_is_no_errno_is_eio():
    assert errno_of(OSError(98765, "?")) == errno.EIO
    assert errno_of(OSError(errno.EPIPE, "?")) == errno.EPIPE


async def test_a_service_that_counts_up_makes_no_new_labels(service, tmp_path):
    numbers = iter(range(10_000, 20_000))

    def counting(asked: Asked) -> bytes | None:
        if "/b/" not in asked.name or "probe" in asked.name:
            return None
        return reply(b"Os { code: %d, kind: Other }" % next(numbers), f"{next(numbers) % 400 + 200} Os {{ code: 5")

    async with Blocks(Bucket(service)).opened(tmp_path) as driver:
        service.lie = counting
        for _ in range(20):
            await driver.store(NAMES)
            await driver.load(NAMES)
        labels = {name for name in driver.tier.counters if name.startswith("errno.")}
        assert all(name.removeprefix("errno.") in errno.errorcode.values() for name in labels)


# ---- redirects


@pytest.fixture
def elsewhere() -> Iterator[LyingS3]:
    """A service on another host, which is to be sent nothing."""
    with lying_s3(host="127.0.0.2") as one:
        yield one


@pytest.mark.parametrize("status", ["301 Moved Permanently", "302 Found", "307 Temporary Redirect"])
async def test_a_redirect_to_another_host_is_not_followed(service, elsewhere, tmp_path, monkeypatch, status):
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)

    def away(asked: Asked) -> bytes:
        return reply(b"", status, Location=f"{elsewhere.endpoint}/{BUCKET}/{asked.name}?lifecycle=")

    for method, name in (("GET", ""), ("GET", "/b/"), ("PUT", "/b/"), ("HEAD", "/b/"), ("POST", "")):
        service.lie = lambda asked, method=method, name=name: (
            away(asked) if asked.method == method and name in asked.name and "probe" not in asked.name else None
        )
        await life(service, tmp_path, **SHORT, **key_files(tmp_path))
    assert elsewhere.asked == []
    assert service.asked


def key_files(folder: Path) -> dict[str, object]:
    """Credentials that are found nowhere else."""
    for name in ("id", "secret"):
        path = folder / name
        path.write_text(name)
        path.chmod(0o600)
    return {"credentials": {"access_key_file": str(folder / "id"), "secret_key_file": str(folder / "secret")}}


# ---- one deadline for all of a request


def slowly(front: bytes) -> Iterator[bytes]:
    yield front
    while True:
        time.sleep(0.05)
        yield b"x"


@pytest.mark.parametrize(
    "front",
    [b"", b"HTTP/1.1 200 OK\r\nX-More: ", b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n"],
    ids=["status line", "header", "body"],
)
def test_a_byte_now_and_then_keeps_no_request_alive(front):
    begun = time.monotonic()
    with raw_server(lambda: slowly(front)) as address, pytest.raises(TimeoutError):
        get(f"http://{address}/", 0.5, 1 << 20, ssl.create_default_context())
    assert time.monotonic() - begun < LIFE_SECONDS / 2


BODIES = {
    "of its bound": lambda: reply(b"x" * 1000),
    "of a byte more": lambda: reply(b"x" * 1001),
    "without an end": lambda: chunked(iter(lambda: ZEROS, None)),
    "of no HTTP": lambda: b"no HTTP\r\n\r\n",
}


@pytest.mark.parametrize("body", BODIES)
def test_a_body_is_read_up_to_its_bound(body):
    may_be = nullcontext() if body == "of its bound" else pytest.raises(OSError, match="Bad message")
    with raw_server(BODIES[body]) as address, may_be:
        assert get(f"http://{address}/", 20, 1000, ssl.create_default_context()) == b"x" * 1000

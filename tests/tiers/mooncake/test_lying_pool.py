"""A pool whose master and whose values lie: each opening ends in its time, with a typed error, in bounded memory."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from support_counts import some
from support_lies import ZEROS, trickled
from support_lying_http import Answer, chunked, raw_server, reply
from support_lying_mooncake import LIES, NO_ANSWER, install
from support_remote_blocks import TWO_SIZES

from kvtier.errors import ConfigError, ResourceError
from kvtier.testing.conformance.base import ConformanceBase
from kvtier_remote.mooncake.master_http import MasterHTTP
from kvtier_remote.mooncake.options import MooncakeOptions
from kvtier_remote.mooncake.tier import MooncakeBackend
from kvtier_remote.mooncake.transport import UNKNOWN_BYTES, pool_facts

JOB_SECONDS = 4.0
SLOW_MACHINE_SECONDS = 60.0


class Blocks(ConformanceBase):
    """Tiers on a pool whose master is only listened to."""

    layout = TWO_SIZES

    def __init__(self, master: str, **changes: Any) -> None:
        self.options = options(master, **changes)

    def make(self, place: Path) -> MooncakeBackend:
        return MooncakeBackend(self.options)


def options(master: str, **changes: Any) -> MooncakeOptions:
    times = {"request_timeout_seconds": 2.0, "job_timeout_seconds": JOB_SECONDS}
    return MooncakeOptions.model_validate({"type": "mooncake", "master": master, "staging": "16MiB"} | times | changes)


@pytest.fixture
def master() -> Iterator[str]:
    with raw_server(lambda: b"") as address:
        yield address


@pytest.mark.parametrize("lie", some(LIES, 3))
async def test_a_marker_that_lies_ends_an_opening_in_its_time(master, tmp_path, monkeypatch, lie):
    """Claims in a circle, claims without an end, quick or slow; answers of other types, numbers and sizes."""
    install(tmp_path, lie, monkeypatch)
    begun = time.monotonic()
    with pytest.raises(ResourceError, match="the epoch of the namespace cannot be read"):
        async with Blocks(master).opened(tmp_path):
            pass
    assert time.monotonic() - begun < SLOW_MACHINE_SECONDS


SEGMENTS: dict[str, Callable[[], Answer]] = {
    "no JSON": lambda: reply(b"\0" * 100),
    "no object": lambda: reply(b"[1, 2]"),
    "no list": lambda: reply(b'{"segments": 5}'),
    "no segments": lambda: reply(b'{"segments": [1, null, "x"]}'),
    "sizes of no type": lambda: reply(b'{"segments": [{"size_bytes": "all"}]}'),
    "sizes below 0": lambda: reply(b'{"segments": [{"size_bytes": -5}]}'),
    "sizes beyond any": lambda: reply(b'{"segments": [{"size_bytes": 1e400}, {"size_bytes": 1%s}]}' % (b"0" * 400)),
    "10^5 levels": lambda: reply(b'{"segments": ' + b"[" * 10**5),
    "10^6 segments": lambda: reply(b'{"segments": [%s]}' % (b"{}," * 10**6 + b"{}")),
    "no end": lambda: chunked(iter(lambda: ZEROS, None)),
    "a byte now and then": lambda: trickled(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n"),
    "a header now and then": lambda: trickled(b"HTTP/1.1 200 OK\r\nX-Filler: "),
    "no HTTP": lambda: b"\0" * 1000,
    "another host": lambda: reply(b"", "302 Found", Location="http://127.0.0.2:1/"),
}


@pytest.mark.parametrize("answer", SEGMENTS)
def test_a_masters_size_of_the_pool_is_a_number_or_not_known(answer):
    with raw_server(SEGMENTS[answer]) as address:
        begun = time.monotonic()
        facts = pool_facts(options(address, admin=address, request_timeout_seconds=1.0))
        assert facts.capacity_bytes == UNKNOWN_BYTES
        assert address in facts.notes[0]
        assert time.monotonic() - begun < SLOW_MACHINE_SECONDS


def test_an_honest_master_is_heard():
    body = json.dumps({"segments": [{"size_bytes": 5 << 30}, {"size_bytes": 1 << 30}]}).encode()
    with raw_server(lambda: reply(body)) as address:
        assert MasterHTTP(address, 20.0).pool_bytes() == 6 << 30
    with raw_server(lambda: reply(b"one\ntwo\n")) as address:
        assert list(MasterHTTP(address, 20.0).names()) == ["one", "two"]


def test_what_the_library_says_of_itself_is_one_short_line(master, tmp_path, monkeypatch):
    """It may quote what a server has sent."""
    install(tmp_path, "circle", monkeypatch)
    library = tmp_path / "lying" / "mooncake" / "store.py"
    library.write_text(library.read_text().replace("return 0", "raise ValueError('x\\n\\x1b[31m' * 10_000)", 1))
    from kvtier_remote.mooncake.client_process import ClientProcess

    one = ClientProcess(options(master), 1 << 20)
    try:
        with pytest.raises(ConfigError) as caught:
            one.open()
    finally:
        one.close()
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 400


ENGINE = """
import sys
from kvtier_remote.mooncake.client_process import ClientProcess
from kvtier_remote.mooncake.options import MooncakeOptions

times = {"request_timeout_seconds": 60, "job_timeout_seconds": 120}
client = ClientProcess(MooncakeOptions.model_validate({"type": "mooncake", "master": "127.0.0.1:1"} | times), 4096)
client._connect(60)
print(client._process.pid, flush=True)
client.ask("get", sys.argv[1:], [0], [64])
"""


def test_a_client_in_a_call_that_does_not_end_ends_with_its_engine(tmp_path, monkeypatch):
    install(tmp_path, NO_ANSWER, monkeypatch)
    called = tmp_path / "called"
    os.mkfifo(called)
    paths = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", ENGINE, called], stdout=subprocess.PIPE, text=True, env=paths
    ) as engine:
        client = os.pidfd_open(int(engine.stdout.readline()))
        try:
            called.read_bytes()
            engine.kill()
            ended, _, _ = select.select([client], [], [], 30.0)
            assert ended
        finally:
            engine.kill()
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(client, signal.SIGKILL)
            os.close(client)

"""A stack process, an engine's client and real bytes between them."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from errno import ESTALE
from pathlib import Path

import pytest
import torch
from support_engine_client import EngineClient

from kvtier.aio.loop_thread import LoopThread
from kvtier.client.connection import Identity
from kvtier.config import parse_stack, stack_parts
from kvtier.service.server import StackServer
from kvtier.tier.contract import LookupResult
from kvtier.types.geometry import KVLayout
from kvtier.types.gpu_runs import GPURuns
from kvtier.types.jobs import GPUGroup, JobKind
from kvtier.types.keys import GroupIndex, OffloadKey, make_key
from kvtier.types.namespace import Namespace

PAGE = 4096
STORE, LOAD = JobKind.STORE, JobKind.LOAD


def keys(count: int, start: int = 0) -> tuple[OffloadKey, ...]:
    return tuple(make_key(number.to_bytes(16, "big"), 0) for number in range(start, start + count))


def namespace() -> Namespace:
    return Namespace(KVLayout.of_pages(PAGE), model="test")


def client_of(path: str, cache: torch.Tensor) -> EngineClient:
    return EngineClient(Identity(path, namespace(), "", secrets.token_hex(16)), [cache])


@contextmanager
def served(folder: Path, rows: int = 256, below: str = "") -> Iterator[str]:
    """A stack process's server, in a thread of this one."""
    config = parse_stack(f"tiers:\n  - {{type: cpu, cpu_bytes_to_use: {rows * PAGE}}}\n{below}")
    path = str(folder / "socket")
    thread = LoopThread("test-service", "service")
    thread.open()
    server = StackServer(lambda namespace: stack_parts(config, namespace), path)
    thread.run(server.__aenter__, 30.0)
    try:
        yield path
    finally:
        thread.run(server.__aexit__, 30.0)
        thread.close(10.0)


def finish(client: EngineClient, job: int) -> list[str]:
    until = time.monotonic() + 20.0
    while time.monotonic() < until:
        for result in client.step():
            if result.job_id == job:
                return [outcome.status.value for group in result.outcomes for outcome in group]
        client.wait(0.05)
    raise AssertionError("a job did not end")


def wait_joined(client: EngineClient) -> None:
    until = time.monotonic() + 20.0
    while not client.core.joined:
        client.step()
        client.wait(0.05)
        assert time.monotonic() < until


def borrow(client: EngineClient) -> None:
    until = time.monotonic() + 20.0
    while not client.core._lent:
        client.step()
        client.wait(0.05)
        assert time.monotonic() < until


def run(client: EngineClient, kind: JobKind, names: tuple[OffloadKey, ...], first: int, request=None) -> list[str]:
    runs = GPURuns.whole(list(range(first, first + len(names))))
    job = client.job(kind, [GPUGroup(GroupIndex(0), names, runs)])
    client.submit(job, request)
    return finish(client, job.job_id)


def test_what_an_engine_stored_it_and_another_one_load(tmp_path):
    content = torch.randint(0, 256, (16, PAGE), dtype=torch.uint8)
    caches = [content.clone(), torch.zeros((16, PAGE), dtype=torch.uint8)]
    with served(tmp_path) as path, client_of(path, caches[0]) as one:
        borrow(one)
        assert run(one, STORE, keys(8), 0) == ["stored"] * 8
        caches[0][8:].zero_()
        with client_of(path, caches[1]) as two:
            wait_joined(two)
            for client, cache, first in ((one, caches[0], 8), (two, caches[1], 0)):
                request = client.request("r", keys(9))
                found = client.lookup(request, keys(9))
                until = time.monotonic() + 10.0
                while LookupResult.RETRY in found and time.monotonic() < until:
                    client.step()
                    found = client.lookup(request, keys(9))
                assert found == [LookupResult.HIT] * 8 + [LookupResult.MISS]
                assert run(client, LOAD, keys(8), first, request) == ["loaded"] * 8
                assert torch.equal(cache[first : first + 8], content[:8])


def test_what_is_on_the_disk_is_reserved_and_loaded(tmp_path):
    (tmp_path / "root").mkdir(mode=0o700)
    below = f"  - {{type: fs, roots: [{tmp_path / 'root'}], capacity: 4MiB, min_free_bytes: 0}}\n"
    content = torch.randint(0, 256, (200, PAGE), dtype=torch.uint8)
    cache = content.clone()
    with served(tmp_path, 64, below) as path, client_of(path, cache) as client:
        for first in range(0, 192, 16):
            borrow(client)
            while len(client.core._lent) < 16:
                client.step()
                client.wait(0.05)
            assert run(client, STORE, keys(16, first), first) == ["stored"] * 16
        asked = client.request("asked", names := keys(192))
        until = time.monotonic() + 10.0
        while LookupResult.RETRY in (found := client.lookup(asked, names)) and time.monotonic() < until:
            client.step()
        asked.end()
        # on a busy machine rows may be lent before the disk has their blocks
        at = [number for number, result in enumerate(found) if result is LookupResult.HIT_PENDING][:8]
        chosen = tuple(names[number] for number in at)
        cache.zero_()
        request, until = client.request("r"), time.monotonic() + 30.0
        while len(request.leased) < 8 and time.monotonic() < until:  # a reservation may be late on a busy machine
            client.reserve(request, chosen)
            while not request.served and time.monotonic() < until:
                client.step()
                client.wait(0.05)
        assert len(request.leased) == 8
        assert run(client, LOAD, chosen, 0, request) == ["loaded"] * 8
        assert torch.equal(cache[:8], content[at])


@pytest.mark.parametrize("what", ["engine", "service"])
def test_an_end_is_seen_by_the_other(what, tmp_path):
    cache = torch.zeros((16, PAGE), dtype=torch.uint8)
    with served(tmp_path) as path:
        client = client_of(path, cache)
        borrow(client)
        assert run(client, STORE, keys(4), 0) == ["stored"] * 4
        if what == "engine":
            client.close()
            with client_of(path, cache) as again:
                wait_joined(again)
                request = again.request("r", keys(4))
                assert again.lookup(request, keys(4))[0] in (LookupResult.HIT, LookupResult.RETRY)
    if what == "service":
        before = client.lookup(client.request("r"), keys(4))
        assert set(before) <= {LookupResult.RETRY, LookupResult.MISS}, "as it was, or as it is known now"
        client.step()
        request = client.request("s", keys(4))
        assert client.lookup(request, keys(4)) == [LookupResult.MISS] * 4
        assert run(client, STORE, keys(2), 0) == ["dropped"] * 2
        client.close()


@pytest.mark.parametrize("errno", [0, ESTALE])
def test_a_store_that_waits_counts_with_the_engines_word(errno, tmp_path):
    cache = torch.randint(0, 256, (16, PAGE), dtype=torch.uint8)
    with served(tmp_path) as path, client_of(path, cache) as client, client_of(path, cache.clone()) as other:
        runs = GPURuns.whole(list(range(4)))
        job = client.job(STORE, [GPUGroup(GroupIndex(0), keys(4), runs)])
        part = client.core.begin_store(job, waits=True)
        assert part is not None
        client._worker.begin(part, client.life)
        client.step()
        assert LookupResult.HIT not in found_by(other, "before")
        client.core.end_store(part.job_id, errno)
        assert finish(client, job.job_id) == ["failed" if errno else "stored"] * 4
        assert found_by(other, "after") == [LookupResult.MISS if errno else LookupResult.HIT] * 4


def found_by(client: EngineClient, name: str) -> list[LookupResult]:
    request = client.request(name, keys(4))
    until = time.monotonic() + 10.0
    while not request.served and time.monotonic() < until:
        client.step()
        client.wait(0.05)
    return client.lookup(request, keys(4))

"""A service compares rows with their checksums in the background, and shuts an engine out whose rows change."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support_served import Served, served
from support_service import PAGE, TestEngine, block_keys, stack_text, until

from kvtier.client.connection import Identity
from kvtier.client.engine import SchedulerClient
from kvtier.client.worker import WorkerClient
from kvtier.control.tiers.slot_table import READY
from kvtier.service import row_audit
from kvtier.tier.contract import LookupResult, Rows, TierContext
from kvtier.tier.registry import discover
from kvtier.types.geometry import Geometry, KVLayout
from kvtier.types.gpu_runs import GPURuns
from kvtier.types.jobs import GPUGroup, JobKind, TransferJob
from kvtier.types.keys import GroupIndex, JobId
from kvtier.types.namespace import Namespace

ROWS = 16
HIT, MISS = LookupResult.HIT, LookupResult.MISS


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setattr(row_audit, "PAUSE_SECONDS", 0.01)
    with served(tmp_path, stack_text(256)) as found:
        found.server.audits_rows = True
        yield found


def scribble(service: Served, numbers: range) -> None:
    """Change a byte of the rows of these blocks, as a copy does that goes on after its report."""

    def write() -> None:
        pool = service.server.pool
        space = next(session.space for session in pool.sessions.values() if session.space is not None)
        for key in space.to_pool(block_keys(len(numbers), numbers.start)):
            pool._rows.view[pool.plane.control.cpu.directory[key], PAGE // 2] ^= 1

    service.run(write)


def corrupt(service: Served) -> int:
    return service.server.stats().tiers["cpu"].corrupt


def test_changed_rows_are_dropped_and_who_filled_three_is_shut_out(service: Served) -> None:
    with TestEngine(service.path, "bad") as bad, TestEngine(service.path, "good") as good:
        assert bad.store(range(16)) == ["stored"] * 16
        assert good.store(range(32, 40)) == ["stored"] * 8
        scribble(service, range(2))
        until(lambda: corrupt(service) == 2, "they are found")
        assert good.look(range(4)) == bad.look(range(4)) == [MISS, MISS, HIT, HIT]
        scribble(service, range(2, 3))
        until(lambda: corrupt(service) == 3, "it is found")
        assert bad.look(range(4)) == [MISS] * 4
        assert good.look(range(4)) == [MISS] * 3 + [HIT]
        assert good.load(range(3, 16)) == ["hit"] * 13, "what it has filled otherwise is right"
        assert set(bad.transfer(JobKind.STORE, range(40, 42))) == {"dropped"}
    until(service.rests, "every row comes back")


def test_all_rows_have_their_turn_and_none_stays_pinned(service: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_audit, "BYTES_AT_ONCE", 3 * PAGE)
    seen: set[int] = set()
    take = row_audit.RowAudit.take

    def taken(audit: row_audit.RowAudit, leased: Iterator[int]) -> None:
        take(audit, leased)
        assert len(audit.taken) <= 3
        seen.update(each.row for each in audit.taken)

    monkeypatch.setattr(row_audit.RowAudit, "take", taken)
    with TestEngine(service.path) as engine:
        engine.store(range(64))
        table = service.server.pool.plane.control.cpu.table
        ready = service.run(lambda: [row for row, state in enumerate(table.state) if state == READY])
        assert len(ready) == 64
        until(lambda: seen >= set(ready), "each was compared")
        engine.store(range(64, 128))
        assert engine.load(range(32, 96)) == ["hit"] * 64
        assert corrupt(service) == 0
    until(service.rests, "every row comes back")


def test_a_changed_row_that_is_leased_stays_until_its_lease_ends(service: Served) -> None:
    with TestEngine(service.path) as engine:
        engine.store(range(8))
        request = engine.reserve(range(8), "r")
        scribble(service, range(1))
        until(lambda: corrupt(service) == 1, "it is found")
        assert service.rows()["QUARANTINED"] == 1
        request.end()
        engine.step()
        until(lambda: "QUARANTINED" not in service.rows(), "it is free")
        assert engine.look(range(2)) == [MISS, HIT]


def test_a_reservation_waits_for_rows_that_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_audit, "PAUSE_SECONDS", 0.01)
    compares, goes_on = threading.Event(), threading.Event()
    compare = row_audit.RowAudit.compare

    def compared(audit: row_audit.RowAudit, rows: Rows) -> list[bool]:
        if len(audit.taken) == ROWS // row_audit.SHARE:
            compares.set()
            assert goes_on.wait(30.0)
        return compare(audit, rows)

    with served(tmp_path, stack_text(ROWS, tmp_path / "root")) as service, TestEngine(service.path) as engine:
        for first in range(0, 2 * ROWS, 2):
            assert engine.store(range(first, first + 2)) == ["stored"] * 2
            until(lambda: service.server.stats().backlog == 0, "they are on disk")
        monkeypatch.setattr(row_audit.RowAudit, "compare", compared)
        service.run(service.server.pool.begin_audit)
        until(compares.is_set, "rows are compared")
        request = engine.client.request("r")
        engine.client.reserve(request, block_keys(ROWS - 1))
        until(lambda: [engine.step(), service.server.stats().tiers["fs"].loaded][1], "some are loaded")
        assert not request.served
        goes_on.set()
        engine.step_until(lambda: request.served, "a reservation is served")
        assert len(request.leased) == ROWS - 1


def test_rows_that_a_disk_has_filled_since_are_held_against_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_audit, "PAUSE_SECONDS", 0.01)
    with served(tmp_path, stack_text(64, tmp_path / "root")) as service:
        service.server.audits_rows = True
        with TestEngine(service.path) as engine:
            for first in range(0, 128, 8):
                assert engine.store(range(first, first + 8)) == ["stored"] * 8
                until(lambda: service.server.stats().backlog == 0, "they are on disk")
            brought = range(4)  # the oldest have left their rows
            assert engine.load(brought) == ["hit"] * 4
            assert service.server.stats().tiers["fs"].loaded == 4
            scribble(service, brought)
            until(lambda: corrupt(service) == 4, "they are found")
            assert engine.load(range(124, 128), "later") == ["hit"] * 4, "it is served"


GREETED, MEASURED = KVLayout.of_pages(2 * PAGE), KVLayout.of_pages(PAGE)


class MeasuringWorker(WorkerClient):
    """A worker that has measured its blocks, as vLLM's does: they are shorter than its greeting named."""

    async def _open_rows(self, link):
        namespace = self._identity.namespace
        context = TierContext(
            "gpu",
            Geometry(namespace.layout, link.welcome.alignment),
            namespace,
            time.monotonic,
            worker=0,
            kv_caches=self._tensors,
        )
        geometry, rows = link.attach(context)
        await self._gpu.open(replace(context, geometry=replace(geometry, layout=MEASURED), rows=rows))


def test_rows_of_an_engine_that_joins_with_shorter_blocks_than_it_greeted_with_are_intact(
    service: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: set[int] = set()
    end = row_audit.RowAudit.end

    def ended(audit: row_audit.RowAudit, intact: list[bool]) -> None:
        compared.update(each.row for each in audit.taken)
        end(audit, intact)

    monkeypatch.setattr(row_audit.RowAudit, "end", ended)
    identity = Identity(service.path, Namespace(GREETED, model="m"), "e", "1" * 32)
    gpu = discover().get("gpu")
    cache = torch.arange(8, dtype=torch.uint8).repeat(PAGE, 1).T.contiguous()
    worker = MeasuringWorker(identity, [cache], gpu(gpu.Options(type="gpu")))
    client = SchedulerClient(identity, complete=False)
    try:
        client.wait_notes(30)
        client.join(Namespace(MEASURED, model="m").manifest().encode())
        client.wait_joined(30)
        client.request("keep")
        until(lambda: client.turn() is None and client.core.room >= 8, "rows are lent")
        groups = (GPUGroup(GroupIndex(0), block_keys(8), GPURuns.whole(list(range(8)))),)
        worker.begin(client.core.begin_store(TransferJob(JobId(0), JobKind.STORE, groups)), client.life)
        until(lambda: client.turn() is None and client.core.ended, "they are stored")
        until(lambda: len(compared) >= 8, "each was compared")
        assert corrupt(service) == 0
        assert not any(session.shut for session in service.server.pool.sessions.values())
    finally:
        worker.close()
        client.close()

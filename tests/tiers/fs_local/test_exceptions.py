"""MemoryError at the first visit of each line of the tier: jobs end, loads are right, close leaves nothing behind."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from pathlib import Path

import pytest
from support_fs import PAGE, TestRows, Tier, flat, keys, layout, open_tier, options
from support_interrupted import faults_of, interrupted_life

import kvtier_fs
from faults.machine.raising import Place, PlaceFault
from kvtier.testing.trace import leaving_no_trace
from kvtier.tier.contract import TierContext
from kvtier.types.geometry import Geometry
from kvtier.types.jobs import BlockStatus
from kvtier.types.namespace import Namespace
from kvtier_fs import FSBackend
from kvtier_fs.io.contract import IORequest
from kvtier_fs.io.full_transfer import FullTransferIO
from kvtier_fs.io.uring import probe_uring
from kvtier_fs.local.root_queue import RootQueue

ENGINES = [
    "threads",
    pytest.param("io_uring", marks=pytest.mark.skipif(bool(probe_uring()), reason="this machine offers no io_uring")),
]
PRODUCT = Path(kvtier_fs.__file__).parent
FOLDERS = [f"{PRODUCT}/{name}" for name in ("local/", "io/", "roots/")]
ENDS_SECONDS = 20.0
NAMES = keys(5)


async def moved(tier: Tier) -> None:
    """Store some blocks and load them: each has an outcome, whatever was raised."""
    with suppress(MemoryError):  # raised before the job was taken on
        flat(await tier.backend.store(tier.store_job(NAMES, [tier.format_region(0, 0)])))
        outcomes = flat(await tier.backend.load(tier.load_job(NAMES)))
        for row, (key, outcome) in enumerate(zip(NAMES, outcomes, strict=True)):
            assert not outcome.ok or tier.holds(row, key, tier.directory[key][1]), "wrong bytes"


async def life(faults: dict[str, PlaceFault], root: Path, settings: dict[str, object]) -> None:
    geometry = Geometry(layout(settings.pop("page_bytes")), PAGE)
    rows = TestRows(8, geometry.row_bytes)
    backend = FSBackend(options(root, **settings))
    context = TierContext("fs", geometry, Namespace(geometry.layout), time.monotonic, rows=rows)
    await interrupted_life(backend, context, faults, lambda opened: moved(Tier(backend, opened, rows, geometry)))


def run_life(fault: PlaceFault, phase: str, root: Path, **settings: object) -> None:
    faults = faults_of(fault, phase)
    with leaving_no_trace(), fault.installed():
        asyncio.run(asyncio.wait_for(life(faults, root, settings), ENDS_SECONDS))


# Raised where the manifest is to be closed, it leaves the file to the collector.
@pytest.mark.filterwarnings("ignore:unclosed file <_io.FileIO name='manifest-:ResourceWarning")
@pytest.mark.parametrize("every", [16, pytest.param(1, marks=[pytest.mark.long, pytest.mark.timeout(1200)])])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("phase", ["open", "move", "close"])
def test_each_line(tmp_path, phase, engine, every):
    changes = {"io_engine": engine, "page_bytes": 4096, "capacity": 64 << 20, "close_timeout_seconds": 5.0}
    counted = PlaceFault(FOLDERS)
    run_life(counted, phase, tmp_path / "root", **changes)
    wrong: dict[Place, str] = {}
    for number, place in enumerate(list(counted.places)[::every]):
        fault = PlaceFault(FOLDERS)
        fault.at = place
        try:
            run_life(fault, phase, tmp_path / f"root{number}", **changes)
            run_life(PlaceFault(FOLDERS), phase, tmp_path / f"root{number}", **changes)
        except Exception as error:
            wrong[place] = f"{type(error).__name__} {str(error)[:100]}"
    assert counted.places
    assert not wrong, f"{len(wrong)} of {len(counted.places)}"


async def test_a_job_ends_although_failing_it_is_interrupted(tmp_path, monkeypatch):
    """A step is left half done, and so are the first attempts to end the jobs of the queue for it."""
    interrupted = []

    def end_failed(queue: RootQueue) -> None:
        interrupted.append(queue)
        if len(interrupted) <= 2:
            raise MemoryError
        ended(queue)

    ended = RootQueue._end_failed
    monkeypatch.setattr(RootQueue, "_end_failed", end_failed)
    monkeypatch.setattr(RootQueue, "_requests", half_done)
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
    async with open_tier(options(tmp_path / "root")) as tier:
        job = tier.store_job(NAMES, [tier.format_region(0, 0)])
        outcomes = flat(await asyncio.wait_for(tier.backend.store(job), ENDS_SECONDS))
    assert [outcome.status for outcome in outcomes] == [BlockStatus.FAILED] * len(NAMES)
    assert len(interrupted) > 2


async def test_close_ends_the_jobs_of_a_failed_queue(tmp_path, monkeypatch):
    """The call that would have ended them was lost."""
    monkeypatch.setattr(RootQueue, "_requests", half_done)
    with monkeypatch.context() as lost:
        lost.setattr(FullTransferIO, "_call_end_failed", lambda self: None)
        async with open_tier(options(tmp_path / "root")) as tier:
            queue = tier.backend._router.queues[0]
            moving = asyncio.create_task(tier.backend.store(tier.store_job(NAMES, [tier.format_region(0, 0)])))
            while not queue.failed:  # noqa: ASYNC110 - nothing says so
                await asyncio.sleep(0)
            lost.undo()
            monkeypatch.setattr(RootQueue, "_requests", half_done)
            await tier.backend.close()
            assert moving.done()
    assert [outcome.status for outcome in flat(await moving)] == [BlockStatus.FAILED] * len(NAMES)


def half_done(queue: RootQueue, batch: object, under_way: int) -> list[IORequest]:
    raise MemoryError

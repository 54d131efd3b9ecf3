"""MemoryError at the first visit of each line of the tier `shared_fs`: jobs end, nothing of a block stays behind."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from pathlib import Path

import pytest
from support_files import FilesTier, account_errors, options, temporaries
from support_fs import PAGE, TestRows, flat, keys, layout
from support_interrupted import faults_of, interrupted_life

import kvtier_fs
from faults.machine.raising import Place, PlaceFault
from kvtier.aio import process_lock
from kvtier.testing.trace import leaving_no_trace
from kvtier.tier.contract import TierContext
from kvtier.types.geometry import Geometry
from kvtier.types.jobs import JobKind
from kvtier.types.namespace import Namespace
from kvtier_fs import SharedFSBackend
from kvtier_fs.shared.root import FilesHooks

PRODUCT = Path(kvtier_fs.__file__).parent
FOLDERS = [f"{PRODUCT}/{name}" for name in ("shared/", "io/", "roots/")]
ENDS_SECONDS = 20.0
NAMES = keys(4)


async def moved(tier: FilesTier) -> None:
    """Store blocks, more than there is room for, load them and reset. Every job has an outcome for each block."""
    for start in range(0, 12, 4):
        for row, key in enumerate(names := keys(4, start=start)):
            tier.fill(row, key)
        with suppress(MemoryError):  # raised before the job was taken on
            assert len(flat(await tier.backend.store(tier.job(JobKind.STORE, names)))) == 4
    with suppress(MemoryError):
        await tier.load(names)
    with suppress(MemoryError):
        await tier.backend.lookup(names)
    with suppress(MemoryError):
        await tier.backend.reset(tier.epoch + 1)
        tier.epoch += 1
        await tier.store(NAMES, version=1)
        await tier.load(NAMES, version=1)


async def life(faults: dict[str, PlaceFault], root: Path) -> None:
    geometry = Geometry(layout(4096), PAGE)
    rows = TestRows(4, geometry.row_bytes)
    settings = options(root, capacity=240 << 10, io_threads=2, close_timeout_seconds=5.0)
    backend = SharedFSBackend(settings, FilesHooks(lock_seconds=10.0))
    context = TierContext("fs", geometry, Namespace(geometry.layout), time.monotonic, rows=rows)
    await interrupted_life(backend, context, faults, lambda opened: moved(FilesTier(backend, opened, rows, geometry)))
    assert backend.counters["close.stuck"] == 0


def run_life(fault: PlaceFault, phase: str, root: Path) -> None:
    faults = faults_of(fault, phase)
    with leaving_no_trace(), fault.installed():
        asyncio.run(asyncio.wait_for(life(faults, root), ENDS_SECONDS))
    assert not list((root / "leases").glob("*"))
    assert not process_lock._locks
    if (root / "superblock").exists():
        assert not any(account_errors(root).values())


# Raised where the manifest is to be closed, it leaves the file to the collector.
@pytest.mark.filterwarnings("ignore:unclosed file <_io.FileIO name='manifest-:ResourceWarning")
@pytest.mark.parametrize("every", [16, pytest.param(1, marks=[pytest.mark.long, pytest.mark.timeout(1200)])])
@pytest.mark.parametrize("phase", ["open", "move", "close"])
def test_each_line(tmp_path, phase, every):
    counted = PlaceFault(FOLDERS)
    run_life(counted, phase, tmp_path / "root")
    wrong: dict[Place, str] = {}
    for number, place in enumerate(list(counted.places)[::every]):
        fault = PlaceFault(FOLDERS)
        fault.at = place
        try:
            run_life(fault, phase, tmp_path / f"root{number}")
            assert phase != "move" or not temporaries(tmp_path / f"root{number}")
            run_life(PlaceFault(FOLDERS), phase, tmp_path / f"root{number}")
            assert not temporaries(tmp_path / f"root{number}"), (
                "swept by the next process, unless it was removed before"
            )
        except Exception as error:
            wrong[place] = f"{type(error).__name__} {str(error)[:100]}"
    assert counted.places
    assert not wrong, f"{len(wrong)} of {len(counted.places)}"

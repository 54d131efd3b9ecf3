"""The conformance suite over the filesystem tier, in every way it can do its I/O."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, settings

from kvtier.testing.conformance import LoadStoreTests
from kvtier.testing.conformance.machine import run_machine
from kvtier_fs import FSBackend, FSOptions, SharedFSBackend, SharedFSOptions


class SlabTests(LoadStoreTests):
    """One root of slab files. `io` is what the variants differ in."""

    survives_reopen = True
    machine_examples = 5
    io: ClassVar[dict[str, object]] = {}

    def make(self, place: Path) -> FSBackend:
        fixed = {"roots": [str(place)], "capacity": "8MiB", "region_bytes": "512KiB", "min_free_bytes": 0}
        return FSBackend(FSOptions.model_validate(fixed | {"io_threads": 2} | self.io))

    def damage(self, place: Path) -> bool:
        """One bit in every kibibyte: blocks, headers, and whatever lies between."""
        for slab in place.glob("slab-*"):
            data = bytearray(slab.read_bytes())
            for at in range(200, len(data), 1024):
                data[at] ^= 0x10
            slab.write_bytes(data)
        return True


class TestSlabThreadsBuffered(SlabTests):
    io: ClassVar[dict[str, object]] = {"io_engine": "threads", "direct": "off"}


class TestSlabThreadsDirect(SlabTests):
    io: ClassVar[dict[str, object]] = {"io_engine": "threads", "direct": "auto"}


class TestSlabUringBuffered(SlabTests):
    io: ClassVar[dict[str, object]] = {"io_engine": "auto", "direct": "off"}


class TestSlabUringDirect(SlabTests):
    io: ClassVar[dict[str, object]] = {"io_engine": "auto", "direct": "auto"}


class TestSlabOnTwoRoots(SlabTests):
    io: ClassVar[dict[str, object]] = {"io_engine": "threads", "direct": "off"}

    def make(self, place: Path) -> FSBackend:
        roots = [f"{place}-one", f"{place}-two"]
        fixed = {"roots": roots, "capacity": "8MiB", "region_bytes": "512KiB", "min_free_bytes": 0, "io_threads": 2}
        return FSBackend(FSOptions.model_validate(fixed | self.io))

    def damage(self, place: Path) -> bool:
        return all(SlabTests.damage(self, root) for root in place.parent.glob(f"{place.name}-*"))


class TestFiles(LoadStoreTests):
    """One file a block, on a folder that several processes may share."""

    survives_reopen = True
    machine_examples = 5

    def make(self, place: Path) -> SharedFSBackend:
        fixed = {"root": str(place), "capacity": "16MiB", "min_free_bytes": 0}
        return SharedFSBackend(SharedFSOptions.model_validate(fixed | {"io_threads": 2}))

    def damage(self, place: Path) -> bool:
        files = [path for path in place.rglob("*") if path.is_file() and path.stat().st_size > 4096]
        for path in files:
            data = bytearray(path.read_bytes())
            data[4100] ^= 0x10
            path.write_bytes(data)
        return bool(files)


@pytest.mark.long
@pytest.mark.parametrize("suite", [TestSlabThreadsBuffered, TestSlabUringDirect, TestFiles])
def test_random_operations_for_hours(suite, tmp_path):
    limits = settings(
        max_examples=20_000, stateful_step_count=100, deadline=None, suppress_health_check=list(HealthCheck)
    )
    run_machine(suite(), tmp_path, limits)

"""A directory in memory that is larger than memory is refused before a root changes."""

from __future__ import annotations

from pathlib import Path

import pytest
from support_fs import keys, layout, open_tier, options

from kvtier.errors import ResourceError
from kvtier.options import INDEX_BYTES_PER_SLOT
from kvtier.tier.memory_limits import Reading, SystemLimits
from kvtier.types.geometry import Geometry
from kvtier_fs import FSBackend
from kvtier_fs.local.opening import Hooks


class Limits:
    """A machine with so much memory left."""

    def __init__(self, *have: int) -> None:
        self._have = have

    def readings(self) -> list[Reading]:
        return [Reading(f"limit {i}", have) for i, have in enumerate(self._have)]


async def test_an_index_larger_than_the_tightest_limit_is_refused_and_nothing_is_written(tmp_path):
    async with open_tier(options(tmp_path / "root")) as tier:
        need = tier.space.num_slot_ids * INDEX_BYTES_PER_SLOT
        await tier.store_all(keys(3))
    before = (tmp_path / "root" / "superblock").read_bytes()
    with pytest.raises(ResourceError, match=rf"needs {need} bytes of memory but limit 1 offers {need - 1}: lower"):
        async with open_tier(options(tmp_path / "root"), hooks=Hooks(limits=Limits(1 << 40, need - 1))):
            pass
    assert (tmp_path / "root" / "superblock").read_bytes() == before
    async with open_tier(options(tmp_path / "root"), hooks=Hooks(limits=Limits(1 << 40, need))) as tier:
        assert len(tier.directory) == 3
    async with open_tier(options(tmp_path / "root"), hooks=Hooks(limits=Limits())) as tier:
        assert len(tier.directory) == 3


def test_a_dry_run_says_so_without_the_roots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(SystemLimits, "readings", Limits(1000).readings)
    backend = FSBackend(options(tmp_path / "root"))
    (problem,) = backend.dry_run(Geometry(layout(16384), 4096), True).problems
    assert "of memory but limit 0 offers 1000" in problem
    assert not backend.dry_run(Geometry(layout(16384), 4096), False).problems

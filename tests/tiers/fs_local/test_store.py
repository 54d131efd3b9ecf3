"""What is stored comes back byte for byte, on either engine, past the page cache or not, also after a reopen."""

from __future__ import annotations

import pytest
from support_fs import keys, layout, open_tier, options

from kvtier.types.jobs import LOADED, STORED
from kvtier_fs.io.uring import probe_uring
from kvtier_fs.local.root_queue import neighbours

ENGINES = [
    "threads",
    pytest.param("io_uring", marks=pytest.mark.skipif(bool(probe_uring()), reason="this machine offers no io_uring")),
]


@pytest.mark.parametrize("direct", ["off", "auto"])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("page_bytes", [4096, 65536, 3 << 20])
async def test_what_was_stored_is_loaded_and_found_again(tmp_path, engine, direct, page_bytes):
    settings = options(tmp_path / "root", capacity=64 << 20, io_engine=engine, direct=direct)
    names = keys(16)
    async with open_tier(settings, layout(page_bytes), rows=8) as tier:
        assert len(tier.opened.recovered.keys) == 0
        assert tier.opened.mode.startswith(f"slab, {engine}")
        await tier.store_all(names)
        assert await tier.load_all(names) == [LOADED] * 16
    async with open_tier(settings, layout(page_bytes), rows=8) as tier:
        assert list(tier.opened.recovered.keys) == names, "oldest generation first"
        assert await tier.load_all(names) == [LOADED] * 16
        more = keys(4, start=100)
        assert await tier.store(more) == [STORED] * 4
        assert await tier.load_all(names + more) == [LOADED] * 20


@pytest.mark.parametrize(
    ("indices", "most", "runs"),
    [
        ([], 4, []),
        ([7], 4, [(0, 1)]),
        ([0, 1, 2, 3, 4], 2, [(0, 2), (2, 4), (4, 5)]),
        ([0, 1, 3, 4, 9], 4, [(0, 2), (2, 4), (4, 5)]),
        ([1, 1, 3], 4, [(0, 1), (1, 2), (2, 3)]),
        ([5, 6, 7], 1, [(0, 1), (1, 2), (2, 3)]),
    ],
)
def test_a_request_takes_slots_that_follow_each_other_without_a_gap(indices, most, runs):
    assert list(neighbours(indices, most)) == runs

"""LMCache's real server and its own benchmarks over a tier of kvtier."""

from __future__ import annotations

from pathlib import Path

import pytest
from support_server import l2_adapter, run, server

pytestmark = [pytest.mark.lmcache, pytest.mark.timeout(3600)]
HITS = "lmcache_mp_lookup_hit_l2_keys_total"
LOADED = "lmcache_mp_l2_prefetch_load_completed_chunks_total"
STORED = "lmcache_mp_l2_store_completed_objects_chunks_total"


@pytest.mark.parametrize(("kib", "keys"), [(256, 128), (4096, 64)])
def test_lmcache_s_own_benchmark_verifies_all_keys(kib: int, keys: int, tmp_path: Path):
    options = ("--data-size-kb", str(kib), "--num-keys", str(keys), "--l1-align-bytes", "4096", "--no-skip-verify")
    printed = run(tmp_path, "bench", "l2", "--l2-adapter", l2_adapter(tmp_path), *options)
    assert f"All {keys} keys data verified OK." in printed


def test_a_server_loads_everything_after_its_memory_was_cleared_and_after_a_restart(tmp_path: Path):
    with server(tmp_path, l2_adapter(tmp_path)) as running:
        found, computed = running.bench()
        assert found == 4, "each prompt the second time"
        assert computed
        running.until(lambda: running.metric(STORED) == 32)
        running.clear_l1()
        assert running.bench() == (8, computed)
        assert (running.metric(HITS), running.metric(LOADED)) == (64, 64)
    with server(tmp_path, l2_adapter(tmp_path)) as running:
        assert running.bench() == (8, computed)
        assert (running.metric(HITS), running.metric(LOADED)) == (64, 64)
        running.process.kill()
    with server(tmp_path, l2_adapter(tmp_path)) as running:
        assert running.bench() == (8, computed)
        assert (running.metric(HITS), running.metric(LOADED)) == (64, 64)


def test_a_frozen_disk_stops_no_server_and_serves_again_when_it_answers(tmp_path: Path):
    with server(tmp_path, l2_adapter(tmp_path, "frozen_adapter", job_timeout_seconds=2)) as running:
        _, computed = running.bench()
        running.until(lambda: running.metric(STORED) == 32)
        running.clear_l1()
        (tmp_path / "frozen").touch()
        assert running.bench()[1] == computed
        assert running.metric(LOADED) == 0
        (tmp_path / "frozen").unlink()

        def loaded() -> bool:
            running.clear_l1()
            assert running.bench()[1] == computed
            return running.metric(LOADED) > 0

        running.until(loaded)  # the tier is tried again after a pause

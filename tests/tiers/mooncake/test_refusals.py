"""What keeps the tier `mooncake` from opening: each mistake is one line with its key, from `kvtier check` as well."""

from __future__ import annotations

from typing import Any

import pytest
from support_checks import check_refuses, checked, open_refuses
from support_mooncake import Pool, PoolBlocks

from kvtier.types.geometry import GroupLayout, KVLayout, TensorRef
from kvtier_remote.mooncake.transport import UNKNOWN_BYTES, pool_facts

pytestmark = [pytest.mark.remote, pytest.mark.mooncake]
SHORT = {"request_timeout_seconds": 2.0}
REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "closed port": ({"master": "127.0.0.1:1"}, "master"),
    "unknown host": ({"master": "kvtier.invalid:50051"}, "master"),
    "no metadata server": ({"metadata_server": "http://127.0.0.1:1/metadata"}, "metadata_server"),
    "no such device": ({"protocol": "rdma", "devices": "mlx5_99"}, "devices"),
}


@pytest.mark.parametrize("kind", REFUSALS)
async def test_what_keeps_a_tier_from_opening_is_one_line_with_its_key(pool, tmp_path, kind):
    changes, key = REFUSALS[kind]
    await open_refuses(PoolBlocks(pool, **(SHORT | changes)), tmp_path, key)


@pytest.mark.parametrize("kind", REFUSALS)
def test_a_check_ends_with_2_and_that_line(pool, tmp_path, kind):
    changes, key = REFUSALS[kind]
    check_refuses(tmp_path, pool.options(**(SHORT | changes)), key)


class LargeBlocks(PoolBlocks):
    """Rows of 3 MiB."""

    layout = KVLayout((GroupLayout((TensorRef(0, 3 << 20),)),))


async def test_blocks_that_do_not_fit_into_the_memory_they_pass_through_are_refused(pool, tmp_path):
    await open_refuses(LargeBlocks(pool, staging="4MiB"), tmp_path, "staging")


def test_so_are_they_by_a_check(pool, tmp_path):
    check_refuses(tmp_path, pool.options(staging="4MiB"), "staging", unprobed=2)


def test_a_pool_without_a_store_is_refused_by_a_check(own_pool: Pool, tmp_path):
    assert checked(tmp_path, own_pool.options()).exit_code == 0
    own_pool.kill("store")
    own_pool.kill("master")
    own_pool.start_master()
    line = check_refuses(tmp_path, own_pool.options(**SHORT), "master")
    assert "has a store's process joined it?" in line


def test_a_check_asks_the_master_for_the_size_of_the_pool(pool, tmp_path):
    facts = pool_facts(pool.options(admin=pool.admin))
    assert facts.capacity_bytes == pool.store_bytes
    assert "512 MiB" in checked(tmp_path, pool.options(admin=pool.admin)).stdout
    silent = pool_facts(pool.options(admin="127.0.0.1:1"))
    assert silent.capacity_bytes == UNKNOWN_BYTES
    assert "127.0.0.1:1" in silent.notes[0]

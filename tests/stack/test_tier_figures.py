"""Figures of tiers, against what the stack really did."""

from __future__ import annotations

from pathlib import Path

from support_stack import PAGE, PLAIN, Engine, fs, keys, load, running, stack_file, store, whole

TOKENS = PLAIN.tokens_per_offloaded_block(0)


async def test_room_in_tokens_and_what_was_written(tmp_path: Path) -> None:
    engine = Engine(PLAIN, 16)
    config = stack_file(PLAIN, 8, fs(tmp_path / "root"))
    async with running(config, engine) as stack:
        assert (await store(stack, engine, whole(keys(6)))).ok
        await stack.drain(30)
        tiers = stack.stats().tiers
    cpu, disk = tiers["cpu"], tiers["fs"]
    assert (cpu.capacity_tokens, cpu.used_tokens) == (8 * TOKENS, 6 * TOKENS)
    assert disk.used_tokens == 6 * TOKENS
    assert disk.written_bytes == disk.used_bytes > disk.store_bytes == 6 * PAGE
    assert (cpu.written_bytes, disk.demoted, disk.promoted) == (0, 6, 0)
    assert (disk.kind, disk.write_policy, disk.admit) == ("fs", "write_through", "always")
    assert {what: one.state for what, one in disk.breakers.items()} == {"load": "closed", "store": "closed"}


async def test_what_opening_found_and_brought_up(tmp_path: Path) -> None:
    engine = Engine(PLAIN, 16)
    config = stack_file(PLAIN, 8, fs(tmp_path / "root"))
    async with running(config, engine) as stack:
        assert (await store(stack, engine, whole(keys(6)))).ok
        await stack.drain(30)
        assert stack.stats().tiers["fs"].recovered == 0
    async with running(config, engine) as stack:
        found = stack.stats().tiers["fs"]
        assert (found.recovered, found.promoted) == (6, 0)
        assert found.recovery_seconds > 0
        assert found.events == {"open.snapshot": 1}
        assert (await load(stack, engine, whole(keys(4)))).ok
        assert stack.stats().tiers["fs"].promoted == 4

"""`kvtier fsck --online` checks a root beside its owner: what is damaged is found, what is being written is not."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support_fs import Tier, keys, open_tier, options
from support_tools import (
    HEADER,
    PAYLOAD,
    Written,
    found,
    overwrite,
    owned_elsewhere,
    refusal,
    run_tier,
    tool,
    tool_json,
    write,
    write_files,
)

from faults.machine import warm
from kvtier_fs.format.region_header import decode_region_header, encode_region_header
from kvtier_fs.format.superblock import decode_superblock, encode_superblock
from kvtier_fs.inspect import local

PAYLOAD_BIT = 8 * (HEADER + 100)


@pytest.fixture
def between(monkeypatch) -> Callable[[Callable[[], None]], list[int]]:
    """Sets what happens between the two looks; returns a list that grows with each wait for the second."""

    def set_up(happens: Callable[[], None]) -> list[int]:
        waits: list[int] = []

        def sleep(seconds: float) -> None:
            assert seconds > 0
            waits.append(1)
            happens()

        monkeypatch.setattr(local.time, "sleep", sleep)
        return waits

    return set_up


def online(root: Path, status: int = 0) -> dict[str, Any]:
    return tool_json("fsck", root, "--online", status=status)


def test_a_root_in_use_is_checked_and_damage_is_found(tmp_path, between):
    waits = between(lambda: None)
    with owned_elsewhere(tmp_path / "root") as owner:
        assert "in use by process" in refusal("fsck", tmp_path / "root")
        document = online(tmp_path / "root")
        assert (document["whole"], document["payload_bytes"], document["damaged"]) == (4, 4 * PAYLOAD, 0)
        assert f"process {owner} on " in document["owner"]
        assert waits == []
        overwrite(tmp_path / "root" / "slab-00000", HEADER + HEADER + 100, b"damaged")
        document = online(tmp_path / "root", status=1)
        assert found(document) == {("corrupt", "payload", 1)}
        assert (document["whole"], len(waits)) == (3, 1)


def test_a_slot_that_is_whole_at_the_second_look_is_no_finding(tmp_path, between):
    written = write(tmp_path / "root")
    written.flip(keys(8)[2], PAYLOAD_BIT)
    waits = between(lambda: written.flip(keys(8)[2], PAYLOAD_BIT))
    document = online(written.path)
    assert (document["whole"], document["counts"], len(waits)) == (8, [], 1)


def test_a_slot_that_changes_between_the_looks_is_left_out(tmp_path, between):
    written = write(tmp_path / "root")
    written.flip(keys(8)[2], PAYLOAD_BIT)
    between(lambda: written.forge(keys(8)[2], generation=77))
    document = online(written.path)
    assert found(document) == {("unchecked", "being_written", 1)}
    assert document["whole"] == 7


def test_a_block_of_an_epoch_that_a_reset_begins_meanwhile_is_whole(tmp_path, between):
    written = write(tmp_path / "root")
    (written.path / "snapshot").unlink()
    written.forge(keys(8)[5], epoch=1)

    def reset() -> None:
        block = decode_superblock((written.path / "superblock").read_bytes())
        assert block is not None
        ((namespace, _),) = block.namespaces
        overwrite(written.path / "superblock", 0, 2 * encode_superblock(block.with_epoch(namespace, 1)))

    assert found(online(written.path, status=1)) == {("corrupt", "epoch", 1)}
    between(reset)
    document = online(written.path)
    assert (document["whole"], found(document)) == (1, {("old", "old", 7)})


def test_a_region_that_is_formatted_meanwhile_is_left_out(tmp_path, between):
    written = write(tmp_path / "root")
    (written.path / "snapshot").unlink()
    written.flip(keys(8)[0], PAYLOAD_BIT)

    def formatted() -> None:
        file = written.path / "slab-00000"
        page = memoryview(bytearray(file.read_bytes()[:HEADER]))
        header = decode_region_header(page)
        assert header is not None
        encode_region_header(replace(header, generation=header.generation + 1), page)
        overwrite(file, 0, bytes(page))

    between(formatted)
    assert found(online(written.path)) == {("unchecked", "being_written", 1)}


@pytest.mark.parametrize("moment", ["read_snapshot", "_check_part"], ids=["before", "after"])
def test_an_engine_that_opens_an_idle_root_meanwhile_takes_the_snapshot_away(tmp_path, monkeypatch, moment):
    """It opens the root before or after the snapshot is read, and stores other blocks over those that were there."""
    written = write(tmp_path / "root")
    step, opened = getattr(local.LocalInspection, moment), []

    async def store_over(tier: Tier) -> None:
        tier.directory.clear()
        await tier.store_all(keys(8, start=100))

    def after_a_session(*arguments: Any) -> Any:
        if not opened:
            opened.append(run_tier(written.path, store_over))
        return step(*arguments)

    monkeypatch.setattr(local.LocalInspection, moment, after_a_session)
    document = online(written.path)
    assert opened
    assert found(document) == {("unchecked", "being_written", 1)}
    assert document["whole"] > 0


@pytest.mark.parametrize("place", [("slab-00000", 60), ("superblock", 60)], ids=["region", "superblock"])
def test_a_record_that_is_whole_at_the_second_look_is_no_finding(tmp_path, between, place):
    written = write(tmp_path / "root")
    file, at = written.path / place[0], place[1]
    good = file.read_bytes()[at : at + 1]
    overwrite(file, at, bytes([good[0] ^ 0xFF]))
    waits = between(lambda: overwrite(file, at, good))
    document = online(written.path)
    assert (document["counts"], len(waits)) == ([], 1)


def test_a_shared_root_is_checked_as_without_the_option(tmp_path):
    written = write_files(tmp_path / "root")
    assert online(written.path)["whole"] == 8
    written.flip(keys(8)[1], PAYLOAD_BIT)
    assert online(written.path, status=1)["damaged"] == 1


def test_a_repair_beside_an_owner_is_refused(tmp_path):
    written: Written = write(tmp_path / "root")
    result = tool("fsck", written.path, "--online", "--repair")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "without --online" in result.stderr


async def test_what_a_tier_writes_meanwhile_is_no_damage(tmp_path):
    """A tier stores 32 blocks after another over those it has, while three checks run in a process."""
    async with open_tier(options(tmp_path / "root")) as tier:
        await tier.store_all(keys(32))
        command = [
            sys.executable,
            "-c",
            "from kvtier.cli import main; main()",
            "fsck",
            str(tmp_path / "root"),
            "--online",
            "--json",
        ]
        for turn in range(3):
            ended = asyncio.create_task(asyncio.to_thread(warm.run, command, capture_output=True))
            rounds = await stored_until(tier, ended, turn)
            check = await ended
            assert (check.returncode, rounds > 0) == (0, True), (check.stdout, check.stderr)
            document = json.loads(check.stdout)
            assert document["damaged"] == 0
            assert {kind for kind, _, _ in found(document)} <= {"unchecked", "old", "orphaned"}


async def stored_until(tier: Tier, ended: asyncio.Task[Any], turn: int) -> int:
    """Store over a tier's blocks again and again until something ended. Returns how often."""
    rounds = 0
    while not ended.done():
        rounds += 1
        tier.directory.clear()  # their slots are free now, and written again
        await tier.store_all(keys(32, start=32 * (rounds + 1000 * turn)))
    return rounds

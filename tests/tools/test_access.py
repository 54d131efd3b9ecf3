"""What the tools for stores keep out, read in pieces, and do where the disk itself fails."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path

import pytest
from support_fs import Tier, keys, layout, open_tier, options, slot_place
from support_tools import HEADER, SLOT, found, loadable, overwrite, tool_json, write

from faults.machine.belongings import belongings, new_since
from kvtier.errors import RootBusyError
from kvtier.tier.inspection import Access, Inspection
from kvtier_fs.inspect.local import LocalInspection

MIB = 1 << 20


def store(root: Path, access: Access) -> Inspection:
    found_store = LocalInspection.inspect(str(root), access)
    assert found_store is not None
    return found_store


async def opening_refusal(root: Path) -> str:
    with pytest.raises(RootBusyError) as caught:
        async with open_tier(options(root)):
            pass
    return str(caught.value)


async def test_a_tier_is_kept_out_while_a_root_is_checked_or_changed_but_not_while_it_is_looked_at(tmp_path):
    root = tmp_path / "root"
    await asyncio.to_thread(write, root)
    store(root, Access.CHECK).close()
    for access, owner in ((Access.CHECK, "a tool that reads it"), (Access.CHANGE, f"process {os.getpid()} on ")):
        held = store(root, access)
        assert f"in use by {owner}" in await opening_refusal(root)
        held.close()
        held.close()
    changing = store(root, Access.CHANGE)
    assert f"process {os.getpid()} on " in await opening_refusal(root)
    with pytest.raises(RootBusyError):
        LocalInspection.inspect(str(root), Access.CHECK)
    changing.close()
    looking = store(root, Access.READ)
    async with open_tier(options(root)) as tier:
        assert list(tier.opened.recovered.keys) == keys(8)
        assert sum(len(listed.blocks) for listed in looking.blocks()) == 8
    looking.close()


def test_two_checks_at_once_do_not_keep_each_other_out(tmp_path: Path) -> None:
    write(tmp_path / "root")
    one, two = store(tmp_path / "root", Access.CHECK), store(tmp_path / "root", Access.CHECK)
    for checking in (one, two):
        assert sum(step.whole for step in checking.check(False)) == 8
        checking.close()


def test_without_a_lock_file_a_root_is_checked_and_the_doubt_is_told(tmp_path: Path) -> None:
    written = write(tmp_path / "root")
    (written.path / "lock").unlink()
    assert any("no lock file" in note for note in tool_json("fsck", written.path)["notes"])
    assert not (written.path / "lock").exists()
    tool_json("fsck", written.path, "--repair")
    assert (written.path / "lock").stat().st_mode & 0o777 == 0o600


def test_a_store_can_be_let_go_of_in_the_middle(tmp_path: Path) -> None:
    write(tmp_path / "root", keys(300))
    before = belongings()
    inspected = store(tmp_path / "root", Access.READ)
    assert next(inspected.blocks()).slots
    inspected.close()
    assert not new_since(before)


def test_a_large_payload_is_verified_to_its_last_byte(tmp_path: Path) -> None:
    async def fill() -> tuple[Path, int]:
        async with open_tier(options(tmp_path / "root", capacity="64MiB"), layout(3 * MIB + 4096), rows=4) as tier:
            await tier.store_all(keys(2))
            return slot_place(tier, keys(2)[0])

    path, offset = asyncio.run(fill())
    assert tool_json("fsck", tmp_path / "root")["payload_bytes"] == 2 * (3 * MIB + 4096)
    last = offset + HEADER + 3 * MIB + 4095
    with path.open("rb") as file:
        file.seek(last)
        overwrite(path, last, bytes([file.read(1)[0] ^ 1]))
    assert found(tool_json("fsck", tmp_path / "root", status=1)) == {("corrupt", "payload", 1)}


@pytest.mark.parametrize("part", ["header", "payload"])
def test_what_the_disk_does_not_give_back_is_a_finding_and_the_rest_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    written = write(tmp_path / "root")
    _, offset = written.places[keys(8)[3]]
    bad = offset + (HEADER if part == "payload" else 0)
    read = os.preadv

    def preadv(fd: int, buffers: list[memoryview], at: int) -> int:
        if at == bad:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(fd, buffers, at)

    monkeypatch.setattr(os, "preadv", preadv)
    document = tool_json("fsck", written.path, "--repair")
    assert found(document) == {("corrupt", "unreadable_EIO", 1)}
    assert document["whole"] == 7
    monkeypatch.undo()
    assert tool_json("fsck", written.path)["whole"] == 7
    assert loadable(written.path) == [*keys(3), *keys(4, start=4)]


def test_damage_that_the_disk_will_not_have_repaired_stays_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = write(tmp_path / "root")
    written.flip(keys(8)[2], 8 * (SLOT - 1))
    _, offset = written.places[keys(8)[2]]
    put = os.pwrite

    def pwrite(fd: int, data: bytes, at: int) -> int:
        if at == offset:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return put(fd, data, at)

    monkeypatch.setattr(os, "pwrite", pwrite)
    document = tool_json("fsck", written.path, "--repair", status=1)
    assert document["counts"] == [{"kind": "corrupt", "reason": "payload", "damage": True, "count": 1, "repaired": 0}]


def test_a_repair_that_ends_midway_leaves_a_root_that_the_next_open_reads_header_by_header(tmp_path: Path) -> None:
    written = write(tmp_path / "root")
    written.flip(keys(8)[0], 8 * 5000)
    repairing = store(tmp_path / "root", Access.CHANGE)
    steps = repairing.check(True)
    assert next(steps).findings[0].repaired
    repairing.close()  # as a crash would: the end of the iteration, which restores the mark, is never reached
    assert not (written.path / "snapshot").exists()
    about = store(tmp_path / "root", Access.READ)
    assert not about.about.clean
    about.close()
    assert loadable(written.path) == keys(8)[1:]


def test_a_reset_after_a_repair_still_ends_what_was_before(tmp_path: Path) -> None:
    written = write(tmp_path / "root")
    overwrite(written.path / "superblock", 700, b"\xff")
    tool_json("fsck", written.path, "--repair")

    async def reset_and_look() -> list[bytes]:
        async with open_tier(options(written.path)) as tier:
            await tier.backend.reset(tier.epoch + 1)
        async with open_tier(options(written.path)) as again:
            assert isinstance(again, Tier)
            return list(again.opened.recovered.keys)

    assert asyncio.run(reset_and_look()) == []

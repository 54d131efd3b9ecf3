"""Numbers that no process ever wrote, under checksums that hold: damaged, never an error of another kind."""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import replace
from typing import Any

import pytest
from support_files import FilesTier, open_files, options
from support_fs import keys
from support_tools import files_options, found, refusal, run_files, tool_json, write_files

from kvtier.errors import ResourceError, RootError
from kvtier.tier.block_envelope import SLOT_MAGIC
from kvtier.tier.checksum import seal
from kvtier.types.jobs import LOADED, MISSING, STORED, BlockOutcome
from kvtier_fs import SharedFSBackend
from kvtier_fs.format.tree_records import (
    decode_epoch,
    decode_tree,
    encode_account,
    encode_epoch,
    encode_lease,
    encode_tree,
)
from kvtier_fs.roots import root_tier
from kvtier_fs.shared.folder import TreeFolder
from kvtier_fs.shared.leases import FolderLeases, Holder, decode_holder, this_process

MOST = 2**64 - 1
BEYOND = (2**63 - 1, 2**63, MOST - 1, MOST)
TOOLS = (["ls"], ["du"], ["fsck"], ["fsck", "--repair"], ["gc", "--old"])


@pytest.mark.parametrize(
    "changes",
    [
        *({"buckets": value} for value in (0, 257, 2**16, 2**32 - 1)),
        *({"fan_out": value} for value in (3, 8, 2**31, 2**32 - 1)),
        *({"header_bytes": value} for value in (0, 1, 4097, 12288, 2**31)),
        *({"row_alignment": value} for value in (0, 1, 6144)),
    ],
    ids=str,
)
def test_a_superblock_beyond_the_limits_is_damaged(tmp_path, changes):
    root = write_files(tmp_path / "root").path
    tree = decode_tree((root / "superblock").read_bytes())
    assert tree is not None
    (root / "superblock").write_bytes(encode_tree(replace(tree, **changes)))
    for command in TOOLS:
        assert "superblock is damaged" in refusal(*command, root)
    for _ in range(2):
        with pytest.raises(RootError, match="superblock is damaged"):
            run_files(root, lambda tier: tier.load(keys(8)))


@pytest.mark.parametrize("epoch", BEYOND)
def test_an_epoch_beyond_the_limit_is_damaged(tmp_path, epoch):
    root = write_files(tmp_path / "root")
    (name,) = (path.name for path in (root.path / "epochs").iterdir() if path.name != "lock")
    (root.path / "epochs" / name).write_bytes(encode_epoch(bytes.fromhex(name), epoch))
    assert ("bad_epoch", "checksum", 1) in found(tool_json("fsck", root.path, status=1))

    async def load() -> list[BlockOutcome]:
        async with open_files(files_options(root.path), new_epoch=1 << 41) as tier:
            return await tier.load(keys(8))

    assert asyncio.run(load()) == [MISSING] * 8
    assert decode_epoch((root.path / "epochs" / name).read_bytes(), bytes.fromhex(name)) == 1 << 41


@pytest.mark.parametrize("used", BEYOND)
def test_an_account_beyond_the_limit_is_counted_anew(tmp_path, used):
    root = write_files(tmp_path / "root", keys(4))
    tree = decode_tree((root.path / "superblock").read_bytes())
    assert tree is not None

    async def work(tier: FilesTier) -> None:
        assert await tier.store(keys(8)) != []
        for number in range(tree.buckets):
            path = root.path / f"bucket-{number:02x}" / "account"
            if path.exists():
                path.write_bytes(encode_account(tree, number, used))
        assert await tier.store(keys(4, start=100)) == [STORED] * 4
        assert await tier.load(keys(4, start=100)) == [LOADED] * 4
        assert tier.counters["defect"] == 0

    run_files(root.path, work)


@pytest.mark.parametrize("changes", [{"generation": value} for value in BEYOND], ids=str)
def test_a_block_beyond_the_limits_is_corrupt(tmp_path, changes):
    root = write_files(tmp_path / "root")
    first, *others = root.places
    root.forge(first, **changes)
    assert tool_json("fsck", root.path, status=1)["whole"] == 7

    async def work(tier: FilesTier) -> None:
        assert await tier.present([first]) == 0
        (outcome,) = await tier.load([first])
        assert not outcome.ok
        assert await tier.load([first]) == [MISSING], "it was removed"
        assert await tier.load(others) == [LOADED] * 7

    run_files(root.path, work)


@pytest.mark.parametrize("length", [0, 1, 90, 111, 112, 200])
def test_a_block_that_is_cut_short_under_a_checksum_that_holds_is_no_block(tmp_path, length):
    root = write_files(tmp_path / "root")
    first = next(iter(root.places))
    root.places[first].write_bytes(seal(SLOT_MAGIC, bytes(length)))

    async def work(tier: FilesTier) -> None:
        assert await tier.present([first]) == 0
        await tier.backend.reset(1)
        await asyncio.gather(*[task for task in tier.backend._background if "prune" in str(task.get_coro())])
        assert tier.counters["pruned"] == 7

    run_files(root.path, work)


def lease(**changes: Any) -> bytes:
    """A lease of a process of this machine, with some fields changed."""
    me = this_process()
    fields: dict[str, Any] = {name: getattr(me, name) for name in Holder.__dataclass_fields__}
    return json.dumps(fields | changes).encode()


LEASES = {
    "pid 1e999": lease(pid=0).replace(b'"pid": 0', b'"pid": 1e999'),
    "started 1e999": lease(started=0).replace(b'"started": 0', b'"started": 1e999'),
    "deep": b"[" * 900,
    "deep pid": lease(pid=0).replace(b'"pid": 0', b'"pid": ' + b"[" * 700),
    "negative": lease(pid=-1),
    "long": lease(pid=int("9" * 600)),
    "text": lease(pid=str(os.getpid())),
    "true": lease(pid=True),
    "half": lease(pid=1.5),
    "beyond": lease(started=2**63),
    "no text": b"\xff\xfe{}",
}


@pytest.mark.parametrize("name", LEASES)
def test_a_lease_that_says_nothing_sensible_stops_nothing(tmp_path, name):
    root = write_files(tmp_path / "root").path
    planted = root / "leases" / "00000000000000aa"
    planted.write_bytes(encode_lease(LEASES[name].decode("latin-1")))
    assert decode_holder(planted.read_bytes()) is None
    assert ("bad_lease", "checksum", 1) in found(tool_json("fsck", root, status=1))
    for command in (["ls"], ["du"], ["gc", "--old"]):
        tool_json(*command, root)

    async def work(tier: FilesTier) -> None:
        await tier.backend.sweep()
        assert await tier.store(keys(8, start=50)) == [STORED] * 8
        await tier.backend.sweep()
        own = [task for task in tier.backend._background if not task.done()]
        assert len(own) == 2, "the heartbeat goes on, and so does sweeping"

    run_files(root, work)
    assert planted.exists(), "a lease that cannot be read counts as held"


def test_a_long_lease_is_no_error_of_the_tools(tmp_path):
    root = write_files(tmp_path / "root")
    (root.path / "leases" / "00000000000000aa").write_bytes(encode_lease(lease(pid=int("9" * 4200)).decode()))
    assert ("bad_lease", "checksum", 1) in found(tool_json("fsck", root.path, status=1))


async def test_a_root_whose_lease_cannot_be_removed_is_left_nevertheless(tmp_path, monkeypatch):
    """A defect in the end of a session is raised once; the next close leaves the folder, and its threads end."""

    def broken(*_: object) -> None:
        raise ValueError("a number does not fit")

    left: list[str] = []
    leave = TreeFolder.leave
    monkeypatch.setattr(TreeFolder, "leave", lambda self: (left.append(self.path), leave(self))[1])
    async with open_files(options(tmp_path / "root")) as tier:
        await tier.store(keys(4))
        monkeypatch.setattr(FolderLeases, "remove", broken)
        with pytest.raises(ValueError, match="a number does not fit"):
            await tier.backend.close()
    assert left == [str(tmp_path / "root")]
    assert tier.counters["close.stuck"] == 0


async def test_a_disk_that_cannot_be_probed_is_a_typed_error(tmp_path, monkeypatch):
    def broken(path: str) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(root_tier, "probe_path", broken)
    backend = SharedFSBackend(options(tmp_path / "root", direct="auto"))
    with pytest.raises(ResourceError, match="Input/output error"):
        await backend.probe_alignment()

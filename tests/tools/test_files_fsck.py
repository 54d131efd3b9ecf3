"""`kvtier fsck` on a root of layout `files`: beside live processes, nothing changed unasked, all clean after repair."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import shutil
from pathlib import Path

import pytest
from support_files import FilesTier, block_files, temporaries
from support_fs import keys
from support_tools import (
    HEADER,
    PAYLOAD,
    SLOT,
    WrittenFiles,
    files_loadable,
    found,
    overwrite,
    refusal,
    run_files,
    shared_elsewhere,
    tool,
    tool_json,
    write_files,
)

import kvtier_fs.inspect.shared_root
from faults.machine.belongings import belongings, new_since
from kvtier_fs.format.tree_records import decode_tree, encode_account, encode_epoch, encode_tree
from kvtier_fs.shared.folder import TreeFolder

DEAD = "00000000deadbeef"
MIB = 1 << 20


def repaired(root: Path, *, left: set[tuple[str, str, int]] = frozenset()) -> None:  # type: ignore[assignment]
    """Repair a root; afterwards a check finds nothing but harmless leftovers."""
    assert tool_json("fsck", root, "--repair")["damaged"] == 0
    assert found(tool_json("fsck", root)) == left


def account(written: WrittenFiles, used: int) -> None:
    """Let the bucket of the first block account for so many bytes more (or less) than it holds."""
    bucket = written.bucket(keys(1)[0])
    tree = decode_tree((written.path / "superblock").read_bytes())
    assert tree is not None
    stated = int.from_bytes((bucket / "account").read_bytes()[48:56], "little")
    number = int(bucket.name.removeprefix("bucket-"), 16)
    (bucket / "account").write_bytes(encode_account(tree, number, stated + used))


def test_a_root_as_it_was_written_is_clean_and_stays_as_it_is(tmp_path: Path) -> None:
    written = write_files(tmp_path / "root", keys(40))
    before = written.files
    document = tool_json("fsck", written.path)
    assert (document["slots"], document["whole"], document["empty"]) == (40, 40, 0)
    assert document["payload_bytes"] == 40 * PAYLOAD
    assert (document["damaged"], document["counts"], document["findings"]) == (0, [], [])
    assert (document["layout"], document["session"], document["clean"], document["owner"]) == (
        "files",
        None,
        None,
        None,
    )
    assert "files, 4 buckets" in tool("fsck", written.path).stdout
    assert tool("fsck", written.path, "--repair").exit_code == 0
    assert written.files == before
    assert files_loadable(written.path, keys(40)) == keys(40)


def test_a_root_in_use_is_checked_beside_its_processes_and_stays_as_it_is(tmp_path: Path) -> None:
    written = write_files(tmp_path / "root")
    with shared_elsewhere(written.path) as sharer:
        before = written.files
        result = tool("fsck", written.path)
        assert result.exit_code == 0, result.output
        assert f"note: in use by process {sharer.pid} on " in result.stderr
        document = tool_json("fsck", written.path, "--repair")
        assert (document["whole"], document["counts"]) == (12, [])
        assert document["owner"].startswith(f"process {sharer.pid} on ")
        assert written.files == before


def test_a_root_that_is_filled_and_evicted_from_meanwhile_shows_no_damage(tmp_path: Path) -> None:
    written = write_files(tmp_path / "root", capacity=1 * MIB)
    with shared_elsewhere(written.path, 1 * MIB) as sharer:
        assert sharer.stdin is not None
        assert sharer.stdout is not None
        for turn in range(8):
            sharer.stdin.write(f"{2000 + 32 * turn}\n")
            sharer.stdin.flush()
            document = tool_json("fsck", written.path)
            assert not document["damaged"], document
            assert int(sharer.stdout.readline()) > 20
    assert found(tool_json("fsck", written.path)) <= {("stale_account", "overstated", 1)}


@pytest.mark.parametrize("fan_out", [1, 2])
def test_blocks_in_folders_inside_buckets_are_checked_as_well(tmp_path: Path, fan_out: int) -> None:
    write_files(tmp_path / "root", [])
    (tmp_path / "root" / "superblock").write_bytes(_with_fan_out(tmp_path / "root", fan_out))
    shutil.rmtree(tmp_path / "root" / "bucket-00", ignore_errors=True)
    written = write_files(tmp_path / "root", keys(40))
    assert len(written.places[keys(1)[0]].relative_to(written.path).parts) == 3
    assert tool_json("fsck", written.path)["whole"] == 40
    written.flip(keys(40)[7], 8 * 5000)
    stray = written.places[keys(1)[0]]
    shutil.copy(stray, written.bucket(keys(1)[0]) / stray.name)
    document = tool_json("fsck", written.path, status=1)
    assert found(document) == {("corrupt", "payload", 1), ("orphaned", "orphaned", 1)}
    assert document["findings"][0]["where"] == str(written.places[keys(40)[7]].relative_to(written.path))
    repaired(written.path, left={("orphaned", "orphaned", 1)})
    assert tool_json("gc", written.path, "--old")["dropped"][0]["blocks"] == 1
    assert found(tool_json("fsck", written.path)) == set()
    assert len(files_loadable(written.path, keys(40))) == 39


def _with_fan_out(root: Path, fan_out: int) -> bytes:
    tree = decode_tree((root / "superblock").read_bytes())
    assert tree is not None
    return encode_tree(type(tree)(tree.root_uuid, tree.header_bytes, tree.row_alignment, 1, fan_out))


def test_every_flipped_bit_of_a_block_is_found_and_repaired(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    names = keys(40)
    written = write_files(tmp_path / "root", names)
    # Each field of the header once, the key, unused bytes of the page, and the payload.
    offsets = [0, 8, 24, 28, 32, 48, 56, 72, 76, 80, 88, 96, 104, 112, 116, 118, 120, 136, 150, 4095]
    bits = [8 * offset + rng.randrange(8) for offset in offsets]
    bits += [rng.randrange(8 * HEADER, 8 * SLOT) for _ in range(19)]
    for key, bit in zip(names, bits, strict=False):
        written.flip(key, bit)
    document = tool_json("fsck", written.path, status=1)
    assert (document["damaged"], document["whole"]) == (39, 1)
    assert {row["kind"] for row in document["counts"]} == {"corrupt"}
    assert {row["reason"] for row in document["counts"]} <= {"magic", "header_checksum", "payload"}
    repaired(written.path)
    assert files_loadable(written.path, names) == names[39:]


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("namespace", b"x" * 16, ("corrupt", "key")),
        ("key", b"another block's key", ("corrupt", "key")),
        ("root_uuid", b"x" * 16, ("foreign", "foreign")),
        ("region", 77, ("corrupt", "region")),
        ("slot_index", 3, ("corrupt", "slot_index")),
        ("region_generation", 9, ("corrupt", "region_generation")),
        ("slot_bytes", PAYLOAD, ("corrupt", "slot_bytes")),
        ("slot_bytes", 2 * SLOT, ("corrupt", "truncated")),
        ("payload_bytes", PAYLOAD - 4096, ("corrupt", "payload_bytes")),
        ("payload_bytes", 0, ("corrupt", "payload_bytes")),
        ("group", 1, ("corrupt", "group")),
        ("epoch", 1, ("corrupt", "epoch")),
        ("payload_digest", b"x" * 16, ("corrupt", "payload")),
    ],
)
def test_a_field_that_is_wrong_under_a_good_checksum_is_named(tmp_path: Path, field, value, expected) -> None:
    written = write_files(tmp_path / "root")
    first = keys(1)[0]
    written.forge(first, **{field: value})
    harm = expected[0] == "corrupt"
    document = tool_json("fsck", written.path, status=int(harm))
    assert found(document) == {(*expected, 1)}
    (finding,) = document["findings"]
    assert finding["where"] == str(written.places[first].relative_to(written.path))
    assert document["whole"] == 7
    repaired(written.path, left=set() if harm else {(*expected, 1)})
    assert written.places[first].exists() is not harm
    assert files_loadable(written.path, keys(8)) == keys(8)[1:]


def test_a_block_in_the_wrong_bucket_is_orphaned_and_no_damage(tmp_path: Path) -> None:
    written = write_files(tmp_path / "root")
    first = keys(1)[0]
    other = next(path for path in sorted(written.path.glob("bucket-*")) if path != written.bucket(first))
    written.places[first].rename(other / written.places[first].name)
    # The accounts of both buckets are wrong as well, one of them dangerously so.
    accounts = {("bad_account", "understated", 1), ("stale_account", "overstated", 1)}
    assert found(tool_json("fsck", written.path, status=1)) == {("orphaned", "orphaned", 1), *accounts}
    repaired(written.path, left={("orphaned", "orphaned", 1)})
    assert files_loadable(written.path, keys(8)) == keys(8)[1:]


INTRUDERS = {
    "truncated": (lambda path, other: os.truncate(path, 7777), "truncated"),
    "truncated to its header": (lambda path, other: os.truncate(path, HEADER), "truncated"),
    "empty": (lambda path, other: os.truncate(path, 0), "truncated"),
    "extended": (lambda path, other: os.truncate(path, SLOT + 1), "slot_bytes"),
    "zeroed": (lambda path, other: path.write_bytes(bytes(SLOT)), "magic"),
    "another key's": (lambda path, other: shutil.copy(other, path), "key"),
    "a symbolic link": (lambda path, other: (path.unlink(), path.symlink_to(other)), "file"),
    "a pipe": (lambda path, other: (path.unlink(), os.mkfifo(path)), "file"),
    "a folder": (lambda path, other: (path.unlink(), path.mkdir()), "file"),
    "a link to a device": (lambda path, other: (path.unlink(), path.symlink_to("/dev/zero")), "file"),
}


@pytest.mark.parametrize("intruder", INTRUDERS)
def test_anything_else_in_a_blocks_place_is_found_and_removed(tmp_path: Path, intruder: str) -> None:
    written = write_files(tmp_path / "root")
    (first, second), (plant, reason) = keys(2), INTRUDERS[intruder]
    plant(written.places[first], written.places[second])
    before = written.places[second].read_bytes()
    document = tool_json("fsck", written.path, status=1)
    assert ("corrupt", reason, 1) in found(document)
    assert {row["kind"] for row in document["counts"]} <= {"corrupt", "stale_account", "bad_account"}
    repaired(written.path)
    assert not os.path.lexists(written.places[first])
    assert written.places[second].read_bytes() == before
    assert files_loadable(written.path, keys(8)) == keys(8)[1:]


def test_a_folder_with_something_in_it_is_told_and_left_alone(tmp_path: Path) -> None:
    written = write_files(tmp_path / "root")
    place = written.places[keys(1)[0]]
    place.unlink()
    place.mkdir()
    (place / "mine").write_text("precious")
    document = tool_json("fsck", written.path, "--repair", status=1)
    assert {(row["kind"], row["reason"], row["repaired"]) for row in document["counts"]} >= {("corrupt", "file", 0)}
    assert (place / "mine").read_text() == "precious"


def test_what_a_dead_process_was_writing_is_orphaned_and_removed_with_its_lease(tmp_path: Path) -> None:
    written = write_files(tmp_path / "root")
    (written.path / "bucket-00" / f"new-{DEAD}-1").write_bytes(bytes(9000))
    (written.path / "epochs" / f"new-{DEAD}-2").write_bytes(b"")
    (written.path / f"new-{DEAD}-3").write_bytes(b"")
    lease = '{"host": "h", "boot": "%s", "pid_namespace": %d, "pid": 4194303, "started": 1}'
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    (written.path / "leases" / DEAD).write_bytes(_sealed_lease(lease % (boot, os.stat("/proc/self/ns/pid").st_ino)))
    document = tool_json("fsck", written.path, status=1)
    assert found(document) == {
        ("orphaned", "temporary", 3),
        ("orphaned", "lease", 1),
        ("bad_account", "understated", 1),
    }
    repaired(written.path)
    assert temporaries(written.path) == []
    assert list((written.path / "leases").iterdir()) == []


def _sealed_lease(text: str) -> bytes:
    from kvtier_fs.format.tree_records import encode_lease

    return encode_lease(text)


def test_what_a_live_process_is_writing_is_none_of_the_tools_business(tmp_path: Path) -> None:
    async def work(tier: FilesTier) -> None:
        assert (await tier.store(keys(8)))[0].ok
        lease = tier.backend._root.lease
        for folder in ("bucket-00", "epochs", "leases", "."):
            (tmp_path / "root" / folder / f"new-{lease}-ffff").write_bytes(b"")
        assert found(tool_json("fsck", tmp_path / "root", "--repair")) == set()
        assert tool("gc", tmp_path / "root", "--old").exit_code == 0
        assert len(temporaries(tmp_path / "root")) == 4
        assert [path.name for path in (tmp_path / "root" / "leases").iterdir() if path.name == lease] == [lease]
        for path in temporaries(tmp_path / "root"):
            path.unlink()

    run_files(tmp_path / "root", work)


def test_a_lease_that_is_damaged_or_no_file_is_told_and_keeps_no_other_from_being_removed(tmp_path: Path) -> None:
    written = write_files(tmp_path / "root")
    leases = written.path / "leases"
    (leases / ("0" * 16)).write_bytes(b"KVTIERLE" + bytes(60))
    os.mkfifo(leases / ("1" * 16))
    (leases / ("2" * 16)).symlink_to("/etc/hostname")
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    lease = '{"host": "h", "boot": "%s", "pid_namespace": %d, "pid": 4194303, "started": 1}'
    (leases / ("f" * 16)).write_bytes(_sealed_lease(lease % (boot, os.stat("/proc/self/ns/pid").st_ino)))
    document = tool_json("fsck", written.path, "--repair", status=1)
    assert found(document) == {("bad_lease", "checksum", 1), ("bad_lease", "file", 2), ("orphaned", "lease", 1)}
    assert sorted(path.name[0] for path in leases.iterdir()) == ["0", "1", "2"]


def test_a_lease_of_another_host_is_taken_to_be_held(tmp_path: Path) -> None:
    written = write_files(tmp_path / "root")
    lease = '{"host": "elsewhere", "boot": "x", "pid_namespace": 1, "pid": 1, "started": 1}'
    (written.path / "leases" / DEAD).write_bytes(_sealed_lease(lease))
    (written.path / "bucket-00" / f"new-{DEAD}-1").write_bytes(b"")
    document = tool_json("fsck", written.path, "--repair")
    assert (document["owner"], document["counts"]) == ("process 1 on 'elsewhere'", [])
    assert len(temporaries(written.path)) == 1


@pytest.mark.parametrize(
    ("by", "expected"), [(-4096, ("bad_account", "understated")), (4096, ("stale_account", "overstated"))]
)
def test_an_account_that_does_not_match_is_found_and_set_right(tmp_path: Path, by: int, expected) -> None:
    written = write_files(tmp_path / "root")
    good = written.files
    account(written, by)
    document = tool_json("fsck", written.path, status=int(by < 0))
    assert found(document) == {(*expected, 1)}
    assert document["findings"][0]["where"].endswith("/account")
    repaired(written.path)
    assert written.files == good


def test_an_account_that_is_damaged_or_missing_or_no_file_is_found_and_set_right(tmp_path: Path) -> None:
    written = write_files(tmp_path / "root")
    good, place = written.files, written.bucket(keys(1)[0]) / "account"
    for damage, expected in (
        (lambda: overwrite(place, 60, b"\xff"), ("bad_account", "checksum", 1)),
        (place.unlink, ("stale_account", "missing", 1)),
        (lambda: (place.unlink(), place.symlink_to("/etc/hostname")), ("bad_account", "file", 1)),
        (lambda: (place.unlink(), os.mkfifo(place)), ("bad_account", "file", 1)),
    ):
        damage()
        assert found(tool_json("fsck", written.path, status=int(expected[0] == "bad_account"))) == {expected}
        repaired(written.path)
        assert written.files == good


def test_a_damaged_copy_of_superblock_or_epoch_is_written_anew_from_the_other(tmp_path: Path) -> None:
    written = write_files(tmp_path / "root")
    good = written.files
    (epoch,) = [path for path in (written.path / "epochs").iterdir() if path.name != "lock"]
    for path, copy_bytes, kind in ((written.path / "superblock", 4096, "bad_superblock"), (epoch, 128, "bad_epoch")):
        for number in (0, 1):
            overwrite(path, number * copy_bytes + 100, b"\xff")
            document = tool_json("fsck", written.path, status=1)
            assert found(document) == {(kind, "checksum", 1)}
            assert document["findings"][0]["where"].endswith(f"{path.name}, copy {number}")
            assert document["whole"] == 8
            repaired(written.path)
            assert written.files == good


def test_blocks_of_a_namespace_whose_epoch_nobody_knows_are_damaged_and_go(tmp_path: Path) -> None:
    written = write_files(tmp_path / "root")
    (epoch,) = [path for path in (written.path / "epochs").iterdir() if path.name != "lock"]
    for at in (60, 128 + 60):
        overwrite(epoch, at, b"\xff")
    assert found(tool_json("fsck", written.path, status=1)) == {("corrupt", "epoch", 8), ("bad_epoch", "checksum", 1)}
    # What the namespace's epoch was cannot be told any more: its blocks go, its epoch stays damaged.
    assert tool_json("fsck", written.path, "--repair", status=1)["damaged"] == 1
    assert block_files(written.path) == []
    epoch.unlink()
    assert found(tool_json("fsck", written.path)) == set()


def test_blocks_that_a_reset_ended_are_old_and_a_reset_meanwhile_is_no_damage(tmp_path: Path) -> None:
    written = write_files(tmp_path / "root")
    (epoch,) = [path for path in (written.path / "epochs").iterdir() if path.name != "lock"]
    epoch.write_bytes(encode_epoch(bytes.fromhex(epoch.name), 1))
    written.forge(keys(1)[0], epoch=1)
    document = tool_json("fsck", written.path)
    assert found(document) == {("old", "old", 7)}
    assert document["whole"] == 1
    repaired(written.path, left={("old", "old", 7)})


def test_what_is_none_of_ours_is_told_and_left_alone(tmp_path: Path) -> None:
    written = write_files(tmp_path / "root")
    (written.path / "notes.txt").write_text("precious")
    (written.path / "bucket-ff").mkdir()
    (written.path / "epochs" / "x").write_text("")
    (written.path / "leases" / "y").mkdir()
    (written.path / "manifest-x.json").symlink_to("/etc/passwd")
    (written.path / "bucket-00" / "a\x1b[2Jname").write_text("precious")
    document = tool_json("fsck", written.path, status=1)
    accounts = {("bad_account", "understated", 1)}  # it lies in the bucket, so it counts
    strangers = {("unknown_file", "name", 5), ("unknown_file", "outside_the_plan", 1)}
    assert found(document) == strangers | accounts
    assert "\x1b" not in tool("fsck", written.path).output
    repaired(written.path, left=strangers)
    assert (written.path / "bucket-00" / "a\x1b[2Jname").read_text() == "precious"


def test_a_folder_that_is_none_is_damage_and_keeps_nothing_else_from_being_checked(tmp_path: Path) -> None:
    written = write_files(tmp_path / "root")
    gone = written.bucket(keys(1)[0])
    inside = [key for key in keys(8) if written.bucket(key) == gone]
    gone.rename(tmp_path / "away")
    gone.symlink_to(tmp_path / "away")
    document = tool_json("fsck", written.path, "--repair", status=1)
    assert found(document) == {("corrupt", "folder", 1)}
    assert document["whole"] == 8 - len(inside)
    assert len(block_files(tmp_path / "away")) == len(inside)


def test_what_the_disk_does_not_give_back_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = write_files(tmp_path / "root")
    bad = written.places[keys(8)[3]].stat().st_ino
    for name in ("pread", "preadv"):
        read = getattr(os, name)

        def failing(fd: int, what: object, at: int, read=read) -> object:
            if os.fstat(fd).st_ino == bad:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return read(fd, what, at)

        with monkeypatch.context() as patch:
            patch.setattr(os, name, failing)
            document = tool_json("fsck", written.path, status=1)
        assert found(document) == {("corrupt", "unreadable_EIO", 1)}
        assert document["whole"] == 7


def test_a_block_that_another_host_evicts_while_it_is_read_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = write_files(tmp_path / "root")
    evicted = written.places[keys(8)[3]]
    read = os.preadv

    def stale(fd: int, buffers: list[memoryview], offset: int, *flags: int) -> int:
        if os.fstat(fd).st_ino == inode:
            raise OSError(errno.ESTALE, "stale file handle")
        return read(fd, buffers, offset, *flags)

    inode = evicted.stat().st_ino
    monkeypatch.setattr(os, "preadv", stale)
    document = tool_json("fsck", written.path)
    assert (document["whole"], document["counts"]) == (7, [])


def test_a_bucket_that_somebody_keeps_locked_is_checked_but_not_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kvtier_fs.inspect.shared_root, "_LOCK_SECONDS", 0.05)
    written = write_files(tmp_path / "root")
    first = keys(1)[0]
    written.flip(first, 8 * 5000)
    account(written, -4096)
    holder = os.open(written.bucket(first) / "lock", os.O_RDWR)
    try:
        fcntl.flock(holder, fcntl.LOCK_EX)
        document = tool_json("fsck", written.path, "--repair", status=1)
        assert found(document) == {("corrupt", "payload", 1), ("unchecked", "account_locked", 1)}
        assert document["damaged"] == 1
        assert written.places[first].exists()
        assert "stays locked by another process" in refusal("gc", written.path, "--namespace", _namespace(written))
    finally:
        os.close(holder)
    repaired(written.path)


def _namespace(written: WrittenFiles) -> str:
    return next(path.name for path in (written.path / "epochs").iterdir() if path.name != "lock")


def test_a_block_that_was_replaced_since_it_was_read_is_not_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = write_files(tmp_path / "root")
    place = written.places[keys(1)[0]]
    good = place.read_bytes()
    written.flip(keys(1)[0], 8 * 5000)
    changing = kvtier_fs.inspect.shared_root.InspectedTree.changing

    def stored_anew(self, number, work):
        (tmp_path / "anew").write_bytes(good)
        (tmp_path / "anew").rename(place)
        return changing(self, number, work)

    monkeypatch.setattr(kvtier_fs.inspect.shared_root.InspectedTree, "changing", stored_anew)
    document = tool_json("fsck", written.path, "--repair", status=1)
    assert document["counts"][0]["repaired"] == 0
    assert place.read_bytes() == good


def test_an_epoch_that_the_disk_does_not_give_back_costs_no_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = write_files(tmp_path / "root")

    def fail(self: TreeFolder, namespace: bytes) -> int | None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(TreeFolder, "epoch", fail)
    assert found(tool_json("fsck", written.path, status=1)) == {("corrupt", "epoch", 8)}
    assert "Input/output error" in refusal("fsck", written.path, "--repair")
    monkeypatch.undo()
    assert tool_json("fsck", written.path)["whole"] == 8


def test_what_is_no_usable_root_cannot_be_checked(tmp_path: Path) -> None:
    written = write_files(tmp_path / "root")
    data = (written.path / "superblock").read_bytes()
    (written.path / "superblock").write_bytes(data[:24] + (1002).to_bytes(4, "little") + data[28:4096])
    assert "holds format version 2 of layout files" in refusal("fsck", written.path)
    (written.path / "superblock").write_bytes(b"garbage" * 1000)
    assert "the superblock is damaged" in refusal("fsck", written.path, "--repair")
    (written.path / "superblock").unlink()
    assert "it has no superblock" in refusal("fsck", written.path)
    (written.path / "superblock").write_bytes(data)
    (tmp_path / "link").symlink_to(written.path)
    assert "is a symbolic link" in refusal("fsck", tmp_path / "link")
    written.path.chmod(0o777)
    assert "chmod go-w" in refusal("fsck", written.path)


def test_neither_keys_nor_payload_bytes_are_printed(tmp_path: Path) -> None:
    written = write_files(tmp_path / "root")
    written.flip(keys(8)[0], 8 * 140)
    for arguments in ((), ("--json",)):
        output = tool("fsck", written.path, *arguments).output
        assert not any(key.hex()[:12] in output for key in keys(8))


def test_checking_leaves_no_descriptor_behind(tmp_path: Path) -> None:
    written = write_files(tmp_path / "root")
    before = belongings()
    for arguments in (("fsck",), ("fsck", "--repair"), ("ls",), ("du",), ("gc", "--old")):
        tool(arguments[0], written.path, *arguments[1:])
        assert not new_since(before)

"""`kvtier fsck` finds whatever is not as it was written, changes nothing unasked, and repairs so that all is clean."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import pytest
from support_fs import Tier, keys
from support_tools import (
    HEADER,
    PAYLOAD,
    SLOT,
    found,
    loadable,
    overwrite,
    owned_elsewhere,
    refusal,
    run_tier,
    tool,
    tool_as_ordinary_user,
    tool_json,
    write,
    write_files,
)

import kvtier.cli.fsck
from kvtier.tier.checksum import BODY_AT, seal
from kvtier_fs.format.superblock import COPY_BYTES, SUPERBLOCK_MAGIC, decode_superblock, encode_superblock

FINDING_KEYS = {"kind", "reason", "where", "repaired"}
SECTOR = 512


def repaired(root: Path, *, left: set[tuple[str, str, int]] = frozenset()) -> dict:  # type: ignore[assignment]
    """Repair a root; afterwards a check finds nothing but harmless leftovers. Returns what the repair said."""
    document = tool_json("fsck", root, "--repair")
    assert document["damaged"] == 0
    again = tool_json("fsck", root)
    assert found(again) == left
    return document


def test_a_root_as_it_was_written_is_clean_and_stays_as_it_is(tmp_path: Path) -> None:
    written = write(tmp_path / "root", keys(40))
    before = written.files
    document = tool_json("fsck", written.path)
    assert (document["slots"], document["whole"], document["empty"]) == (66, 40, 26)
    assert document["payload_bytes"] == 40 * PAYLOAD
    assert (document["damaged"], document["counts"], document["findings"], document["findings_left_out"]) == (
        0,
        [],
        [],
        0,
    )
    assert (document["command"], document["version"], document["owner"], document["clean"]) == ("fsck", 1, None, True)
    assert "40 whole" in tool("fsck", written.path).stdout
    assert tool("fsck", written.path, "--repair").exit_code == 0
    after = written.files
    assert {name for name in before if before[name] != after[name]} <= {"lock"}
    assert loadable(written.path) == keys(40)


def test_a_root_without_any_block_is_clean(tmp_path: Path) -> None:
    assert tool_json("fsck", write(tmp_path / "root", []).path)["slots"] == 0


def test_every_flipped_bit_of_a_slot_is_found_and_repaired(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    names = keys(8)
    # Each field of the header once, the key, unused bytes of the page, and the payload.
    offsets = [0, 8, 24, 28, 32, 48, 56, 72, 76, 80, 88, 96, 104, 112, 116, 118, 120, 136, 150, 4095]
    bits = [8 * offset + rng.randrange(8) for offset in offsets]
    bits += [rng.randrange(8 * HEADER, 8 * SLOT) for _ in range(20)]
    for start in range(0, len(bits), len(names)):
        written = write(tmp_path / f"root-{start}", names)
        part = bits[start : start + len(names)]
        for key, bit in zip(names, part, strict=False):
            written.flip(key, bit)
        document = tool_json("fsck", written.path, status=1)
        assert document["damaged"] == len(part)
        assert {row["kind"] for row in document["counts"]} == {"corrupt"}
        assert {row["reason"] for row in document["counts"]} <= {"magic", "header_checksum", "payload"}
        assert document["whole"] == len(names) - len(part)
        assert repaired(written.path)["damaged"] == 0
        assert loadable(written.path) == names[len(part) :]


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("root_uuid", b"x" * 16, ("foreign", "foreign")),
        ("region", 7, ("corrupt", "region")),
        ("region_generation", 9, ("orphaned", "orphaned")),
        ("slot_index", 5, ("corrupt", "slot_index")),
        ("slot_bytes", 2 * SLOT, ("corrupt", "slot_bytes")),
        ("payload_bytes", SLOT, ("corrupt", "payload_bytes")),
        ("payload_bytes", 0, ("corrupt", "payload_bytes")),
        ("payload_bytes", PAYLOAD - 4096, ("corrupt", "payload")),
        ("key", b"abcd", ("corrupt", "key")),
        ("group", 1, ("corrupt", "group")),
        ("epoch", 1, ("corrupt", "epoch")),
    ],
)
def test_a_field_that_is_wrong_under_a_good_checksum_is_named(tmp_path: Path, field, value, expected) -> None:
    written = write(tmp_path / "root")
    written.forge(keys(8)[0], **{field: value})
    (written.path / "snapshot").unlink()
    harm = expected[0] == "corrupt"
    document = tool_json("fsck", written.path, status=int(harm))
    assert found(document) == {(*expected, 1)}
    (finding,) = document["findings"]
    assert set(finding) == FINDING_KEYS
    assert finding["where"] == "slab-00000, region 0, slot 0"
    assert document["whole"] == 7
    repaired(written.path, left=set() if harm else {(*expected, 1)})
    assert loadable(written.path) == keys(8)[1:]


def test_swapped_slots_are_both_found(tmp_path: Path) -> None:
    written = write(tmp_path / "root")
    one, two = keys(8)[2:4]
    first, second = written.peek(one, 0, SLOT), written.peek(two, 0, SLOT)
    written.poke(one, 0, second)
    written.poke(two, 0, first)
    assert found(tool_json("fsck", written.path, status=1)) == {("corrupt", "slot_index", 2)}
    repaired(written.path)


def test_a_torn_slot_is_found_wherever_it_is_torn(tmp_path: Path) -> None:
    written = write(tmp_path / "root")
    one, two, three = keys(3)
    written.poke(one, 0, bytes(SECTOR))
    written.poke(two, HEADER - SECTOR, b"\1" * SECTOR)
    written.poke(three, SLOT - SECTOR, bytes(SECTOR))
    document = tool_json("fsck", written.path, status=1)
    # Without its first sector a header is all zeros, as if the slot had never been written.
    lost = ("corrupt", "lost_block", 1)  # but the snapshot of the clean close knows better
    assert found(document) == {("corrupt", "header_checksum", 1), ("corrupt", "payload", 1), lost}
    assert (document["whole"], document["empty"]) == (5, 33 - 7)
    repaired(written.path)


def test_blocks_of_several_namespaces_are_whole_side_by_side(tmp_path: Path) -> None:
    write(tmp_path / "root", keys(4), tag="one")

    async def store_more(tier: Tier) -> None:
        held = tier.opened.recovered.formats[0].slot_bytes
        tier.directory = {bytes([i]) * 8: (i, 0) for i in range(4)}  # the places of the other namespace
        assert held == SLOT
        await tier.store_all(keys(3, start=50))

    run_tier(tmp_path / "root", store_more, tag="two")
    document = tool_json("fsck", tmp_path / "root")
    assert (document["whole"], document["counts"]) == (7, [])


def test_blocks_that_a_reset_ended_are_old_and_no_damage(tmp_path: Path) -> None:
    write(tmp_path / "root", keys(6))

    async def reset(tier: Tier) -> None:
        await tier.backend.reset(tier.epoch + 1)

    run_tier(tmp_path / "root", reset)
    document = tool_json("fsck", tmp_path / "root")
    assert found(document) == {("old", "old", 6)}
    assert document["whole"] == 0
    repaired(tmp_path / "root", left={("old", "old", 6)})


def test_what_an_earlier_cut_left_is_orphaned_or_nothing_and_no_damage(tmp_path: Path) -> None:
    written = write(tmp_path / "root", keys(30))

    async def format_again(tier: Tier) -> None:
        tier.directory.clear()
        await tier.store(keys(2, start=90), [tier.format_region(0, 0)])

    run_tier(written.path, format_again)
    document = tool_json("fsck", written.path)
    assert found(document) == {("orphaned", "orphaned", 28)}
    assert document["whole"] == 2
    # A slot that was damaged before its region was formatted again is still recognised by its magic and its checksum.
    written.flip(keys(30)[9], 8 * 2000)
    assert found(tool_json("fsck", written.path, status=1)) == {
        ("orphaned", "orphaned", 27),
        ("corrupt", "header_checksum", 1),
    }


def test_the_slab_of_another_root_is_foreign(tmp_path: Path) -> None:
    one, two = write(tmp_path / "one"), write(tmp_path / "two")
    shutil.copyfile(one.path / "slab-00000", two.path / "slab-00000")
    foreign = {("foreign", "region_root", 1), ("foreign", "foreign", 8)}
    document = tool_json("fsck", two.path, status=1)
    assert found(document) == {*foreign, ("corrupt", "lost_region", 1)}
    assert document["whole"] == 0
    repaired(two.path, left=foreign)


def test_a_slab_cut_off_within_a_slot_is_found_and_reserved_again(tmp_path: Path) -> None:
    written = write(tmp_path / "root")
    path, offset = written.places[keys(8)[4]]
    size = path.stat().st_size
    os.truncate(path, offset + HEADER + SECTOR)
    document = tool_json("fsck", written.path, status=1)
    reserving = ("truncated", "length", 1)
    assert found(document) - {reserving} == {("corrupt", "truncated", 1), ("corrupt", "lost_block", 3)}
    assert document["whole"] == 4
    cut_short = reserving in found(document)
    repaired(written.path)
    # Reserved where the file system does reserve; elsewhere a short file is nothing unusual.
    assert path.stat().st_size == size or not cut_short
    assert loadable(written.path) == keys(4)


@pytest.mark.parametrize("number", [0, 1])
def test_a_damaged_superblock_copy_is_found_and_written_anew_from_the_other(tmp_path: Path, number: int) -> None:
    written = write(tmp_path / "root")
    good = (written.path / "superblock").read_bytes()
    at = number * COPY_BYTES
    overwrite(written.path / "superblock", at + 700, b"\xff")
    document = tool_json("fsck", written.path, status=1)
    assert found(document) == {("bad_superblock", "checksum", 1)}
    assert document["findings"][0]["where"] == f"superblock, copy {number}"
    assert document["whole"] == 8
    repaired(written.path)
    assert (written.path / "superblock").read_bytes() == good
    assert loadable(written.path) == keys(8)


@pytest.mark.parametrize("number", [0, 1])
def test_a_stale_superblock_copy_is_no_damage_and_is_brought_up_to_date(tmp_path: Path, number: int) -> None:
    written = write(tmp_path / "root")
    good = (written.path / "superblock").read_bytes()
    block = decode_superblock(good)
    assert block is not None
    stale = type(block)(**{name: getattr(block, name) for name in block.__slots__} | {"sequence": block.sequence - 1})
    overwrite(written.path / "superblock", number * COPY_BYTES, encode_superblock(stale))
    assert found(tool_json("fsck", written.path)) == {("stale_superblock", "sequence", 1)}
    repaired(written.path)
    assert (written.path / "superblock").read_bytes() == good


def test_a_superblock_cut_after_its_first_copy_is_stale(tmp_path: Path) -> None:
    written = write(tmp_path / "root")
    os.truncate(written.path / "superblock", COPY_BYTES)
    assert found(tool_json("fsck", written.path)) == {("stale_superblock", "missing", 1)}
    repaired(written.path)
    assert (written.path / "superblock").stat().st_size == 2 * COPY_BYTES


def test_a_damaged_region_header_is_told_again_by_the_slots(tmp_path: Path) -> None:
    written = write(tmp_path / "root", keys(40))
    overwrite(written.path / "slab-00000", 60, b"\xff")
    document = tool_json("fsck", written.path, status=1)
    assert found(document) == {("corrupt", "region_header_checksum", 1)}
    assert document["whole"] == 8
    assert document["findings"][0]["where"] == "slab-00000, region 0"
    assert repaired(written.path)["whole"] == 40
    assert loadable(written.path) == sorted(keys(40), key=keys(40).index)


def test_a_region_header_whose_slots_are_gone_becomes_an_empty_region(tmp_path: Path) -> None:
    written = write(tmp_path / "root")
    for key in keys(8):
        written.poke(key, 0, bytes(HEADER))
    overwrite(written.path / "slab-00000", 60, b"\xff")
    assert tool("fsck", written.path).exit_code == 1
    assert repaired(written.path)["slots"] == 0
    assert loadable(written.path) == []


def test_files_that_are_none_of_ours_are_told_and_left_alone(tmp_path: Path) -> None:
    written = write(tmp_path / "root")
    (written.path / "notes.txt").write_text("precious")
    (written.path / "slab-00099").write_bytes(b"x")
    (written.path / "a\x1b[2Jname").mkdir()
    document = tool_json("fsck", written.path)
    assert found(document) == {("unknown_file", "name", 2), ("unknown_file", "outside_the_plan", 1)}
    assert "\x1b" not in tool("fsck", written.path).output
    repaired(written.path, left=found(document))
    assert (written.path / "notes.txt").read_text() == "precious"


def test_a_damaged_snapshot_is_found_and_removed(tmp_path: Path) -> None:
    written = write(tmp_path / "root")
    snapshot = written.path / "snapshot"
    overwrite(snapshot, snapshot.stat().st_size - 1, b"\xff")
    assert found(tool_json("fsck", written.path, status=1)) == {("bad_snapshot", "checksum", 1)}
    repaired(written.path)
    assert not snapshot.exists()
    assert loadable(written.path) == keys(8)


def test_a_region_that_the_snapshot_knows_but_the_slab_does_not_is_found(tmp_path: Path) -> None:
    written = write(tmp_path / "root", keys(40))
    slab = written.path / "slab-00000"
    slab.write_bytes(bytes(slab.stat().st_size))
    assert found(tool_json("fsck", written.path, status=1)) == {("corrupt", "lost_region", 2)}
    repaired(written.path)
    assert loadable(written.path) == []


def test_a_repair_is_not_undone_by_the_snapshot_of_the_session_before(tmp_path: Path) -> None:
    written = write(tmp_path / "root")
    assert (written.path / "snapshot").exists()
    written.flip(keys(8)[0], 8 * 5000)
    repaired(written.path)
    assert loadable(written.path) == keys(8)[1:]


def test_findings_beyond_the_limit_are_counted(tmp_path: Path) -> None:
    written = write(tmp_path / "root", keys(30))
    for key in keys(30):
        written.flip(key, 8 * 5000)
    document = tool_json("fsck", written.path, "--limit", "7", status=1)
    assert (document["damaged"], len(document["findings"]), document["findings_left_out"]) == (30, 7, 23)
    text = tool("fsck", written.path).stdout
    assert text.count("slab-00000, region 0, slot") == 20
    assert "and 10 more" in text
    assert "DAMAGED: 30" in text


def test_neither_keys_nor_payload_bytes_are_printed(tmp_path: Path) -> None:
    written = write(tmp_path / "root")
    written.flip(keys(8)[0], 8 * 140)
    for arguments in ((), ("--json",)):
        output = tool("fsck", written.path, *arguments).output
        assert not any(key.hex()[:12] in output for key in keys(8))


def test_a_live_root_is_refused_with_the_name_of_its_owner(tmp_path: Path) -> None:
    with owned_elsewhere(tmp_path / "root") as owner:
        for arguments in ((), ("--repair",), ("--json",)):
            assert f"in use by process {owner} on " in refusal("fsck", tmp_path / "root", *arguments)
    assert tool("fsck", tmp_path / "root").exit_code == 0


def test_what_is_no_root_cannot_be_checked(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir(mode=0o700)
    assert "holds no store of blocks of a known type" in refusal("fsck", tmp_path / "empty")
    assert list((tmp_path / "empty").iterdir()) == []
    assert "is not there" in refusal("fsck", tmp_path / "absent")
    (tmp_path / "file").write_text("")
    assert "is not a folder" in refusal("fsck", tmp_path / "file")
    written = write(tmp_path / "root")
    (tmp_path / "link").symlink_to(written.path)
    assert "is a symbolic link" in refusal("fsck", tmp_path / "link")
    written.path.chmod(0o777)
    assert "chmod go-w" in refusal("fsck", written.path)


def test_a_root_that_another_release_began_to_use_is_refused_although_our_copy_is_whole(tmp_path: Path) -> None:
    superblock = write(tmp_path / "root").path / "superblock"
    body = (7).to_bytes(4, "little") + superblock.read_bytes()[BODY_AT + 4 : COPY_BYTES]
    overwrite(superblock, COPY_BYTES, seal(SUPERBLOCK_MAGIC, body, COPY_BYTES))
    before = superblock.read_bytes()
    assert "holds format version 7 of layout slab" in refusal("fsck", superblock.parent, "--repair")
    assert superblock.read_bytes() == before


@pytest.mark.parametrize("layout", ["slab", "files"])
def test_a_flipped_bit_of_the_version_does_not_change_the_layout(tmp_path: Path, layout: str) -> None:
    superblock = (write if layout == "slab" else write_files)(tmp_path / "root").path / "superblock"
    data = superblock.read_bytes()
    for bit in range(32):
        damaged = bytearray(data)
        for copy in (0, len(data) // 2):
            damaged[copy + 24 + bit // 8] ^= 1 << bit % 8
        superblock.write_bytes(damaged)
        said = refusal("fsck", superblock.parent)
        assert f"of layout {layout}, which" in said or (layout == "files" and "stop all processes that use" in said), (
            bit
        )


def test_an_interrupted_check_says_no_more_than_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(kvtier.cli.fsck.Report, "add", interrupt)
    result = tool("fsck", write(tmp_path / "root").path)
    assert (result.exit_code, result.stdout, result.stderr) == (130, "", "interrupted\n")


def test_a_root_that_does_not_say_what_it_is_cannot_be_checked(tmp_path: Path) -> None:
    written = write(tmp_path / "root")
    for at in (0, COPY_BYTES):
        overwrite(written.path / "superblock", at + 700, b"\xff")
    assert "superblock has no whole copy" in refusal("fsck", written.path)
    (written.path / "superblock").unlink()
    assert "superblock has no whole copy" in refusal("fsck", written.path, "--repair")


@pytest.mark.parametrize("name", ["superblock", "lock", "slab-00000"])
def test_a_link_in_the_place_of_a_file_is_refused_and_not_followed(tmp_path: Path, name: str) -> None:
    written = write(tmp_path / "root")
    victim = tmp_path / "victim"
    (written.path / name).rename(victim)
    before = victim.read_bytes()
    (written.path / name).symlink_to(victim)
    assert f"{name} is not a plain file" in refusal("fsck", written.path, "--repair")
    assert victim.read_bytes() == before


@pytest.mark.parametrize(("mode", "name"), [(0o000, ""), (0o200, "superblock"), (0o200, "lock"), (0o200, "slab-00000")])
def test_without_permission_it_cannot_be_checked(tmp_path: Path, mode: int, name: str) -> None:
    written = write(tmp_path / "root")
    (written.path / name).chmod(mode)
    done = tool_as_ordinary_user("fsck", written.path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "no permission" in done.stderr

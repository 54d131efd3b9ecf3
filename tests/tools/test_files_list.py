"""`kvtier ls`, `du` and `gc` on a root of layout `files`: beside live processes, and of the right blocks only."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support_files import block_files
from support_fs import keys
from support_tools import (
    PAYLOAD,
    SLOT,
    digest,
    files_loadable,
    found,
    refusal,
    run_files,
    shared_elsewhere,
    tool,
    tool_json,
    write_files,
)

from kvtier.tier.block_envelope import decode_slot_header, encode_slot_header
from kvtier.types.keys import key_hash
from kvtier_fs.format.tree_records import encode_epoch

ONE, TWO = keys(5), keys(3, start=70)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """5 blocks of one namespace and 3 of another, tagged `two`."""
    write_files(tmp_path / "root", ONE)
    write_files(tmp_path / "root", TWO, tag="two")
    return tmp_path / "root"


def raise_epoch(root: Path, namespace: str) -> None:
    (root / "epochs" / namespace).write_bytes(encode_epoch(bytes.fromhex(namespace), 1))


def test_a_block_is_listed_with_its_bucket_its_age_and_when_it_was_used(tmp_path: Path) -> None:
    begun = time.time()
    written = write_files(tmp_path / "root", ONE)
    before = written.files
    document = tool_json("ls", written.path)
    assert (document["layout"], document["session"], document["clean"]) == ("files", None, None)
    assert {block["key"] for block in document["blocks"]} == {key_hash(key).hex()[:12] for key in ONE}
    for block in document["blocks"]:
        assert (block["namespace"], block["group"], block["state"]) == (digest(), 0, "current")
        assert (block["payload_bytes"], block["stored_bytes"], block["hits"]) == (PAYLOAD, SLOT, None)
        assert begun - 1 < block["stored_at"] <= time.time()
        assert block["used_at"] == pytest.approx(block["stored_at"], abs=5)
    places = [(block["region"], block["slot"]) for block in document["blocks"]]
    assert places == sorted(set(places))
    assert {region for region, _ in places} == {int(written.bucket(key).name[-2:], 16) for key in ONE}
    heading, *lines = tool("ls", written.path).stdout.splitlines()
    assert len(lines) == 5
    assert all(" stored 20" in line and " used 20" in line for line in lines)
    assert lines[0].index("current") == heading.index("state")
    assert written.files == before


def test_blocks_are_sorted_by_when_they_were_used(tmp_path: Path) -> None:
    written = write_files(tmp_path / "root", ONE)
    for number, key in enumerate(ONE):
        os.utime(written.places[key], (0, 1e9 + (7 * number) % 5))
    listed = tool_json("ls", written.path, "--sort", "used", "--full")["blocks"]
    order = sorted(range(5), key=lambda number: 7 * number % 5)
    assert [block["key"] for block in listed] == [key_hash(ONE[number]).hex() for number in order]
    os.utime(written.places[ONE[0]], ns=(0, -(2**62)))
    assert tool("ls", written.path).exit_code == 0


def test_usage_is_added_up_by_namespace_group_and_bucket(root: Path) -> None:
    document = tool_json("du", root)
    rows = {row["namespace"]: row for row in document["rows"]}
    assert set(rows) == {digest(), digest("two")}
    one, two = rows[digest()], rows[digest("two")]
    assert (one["blocks"], one["payload_bytes"], one["stored_bytes"], one["epoch"]) == (5, 5 * PAYLOAD, 5 * SLOT, 0)
    assert (two["blocks"], two["tag"], two["session"], two["opened_at"]) == (3, "two", None, None)
    assert one["newest_stored_at"] <= two["oldest_stored_at"]
    assert [row["blocks"] for row in tool_json("du", root, "--by", "group")["rows"]] == [
        one["blocks"] if name == digest() else two["blocks"] for name in sorted(rows)
    ]
    by_bucket = tool_json("du", root, "--by", "region")["rows"]
    assert sum(row["blocks"] for row in by_bucket) == document["total"]["blocks"] == 8
    text = tool("du", root).stdout
    assert "4 buckets; leftover" in text
    assert "oldest stored" in text


def test_a_root_in_use_is_listed_beside_its_processes_who_are_named(tmp_path: Path) -> None:
    with shared_elsewhere(tmp_path / "root") as sharer:
        for command in ("ls", "du"):
            result = tool(command, tmp_path / "root")
            assert result.exit_code == 0, result.output
            assert f"note: in use by process {sharer.pid} on " in result.stderr
        assert len(tool_json("ls", tmp_path / "root")["blocks"]) == 4
    assert tool_json("ls", tmp_path / "root")["owner"] is None


def test_what_can_no_longer_be_loaded_is_listed_when_asked_for_and_dropped_when_asked_to(root: Path) -> None:
    raise_epoch(root, digest())
    assert len(tool_json("ls", root)["blocks"]) == 3
    states = sorted(block["state"] for block in tool_json("ls", root, "--all")["blocks"])
    assert states == ["current"] * 3 + ["old"] * 5
    total = tool_json("du", root)["total"]
    assert (total["blocks"], total["leftover_blocks"], total["leftover_bytes"]) == (3, 5, 5 * SLOT)
    dropped = tool_json("gc", root, "--old")["dropped"]
    assert dropped == [{"namespace": digest(), "blocks": 5, "stored_bytes": 5 * SLOT}]
    assert found(tool_json("fsck", root)) == set()
    assert files_loadable(root, TWO, tag="two") == TWO


def test_a_namespace_is_dropped_and_the_others_stay(root: Path) -> None:
    document = tool_json("gc", root, "--namespace", digest("two")[:8])
    assert document["dropped"] == [{"namespace": digest("two"), "blocks": 3, "stored_bytes": 3 * SLOT}]
    assert len(block_files(root)) == 5
    assert not (root / f"manifest-{digest('two')}.json").exists()
    assert (root / f"manifest-{digest()}.json").exists()
    assert (root / "epochs" / digest("two")).exists(), "an epoch never falls"
    assert found(tool_json("fsck", root)) == set()
    assert files_loadable(root, TWO, tag="two") == []
    assert files_loadable(root, ONE) == ONE


def test_a_dry_run_and_a_slip_change_nothing(root: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*")}
    document = tool_json("gc", root, "--namespace", digest("two"), "--dry-run")
    assert document["dropped"] == [{"namespace": digest("two"), "blocks": 3, "stored_bytes": 3 * SLOT}]
    assert "no namespace begins with 'ffffff'" in refusal("gc", root, "--all-but", "ffffff")
    assert "give one of" in refusal("gc", root)
    assert {path: path.stat().st_mtime_ns for path in root.rglob("*")} == before


def test_a_root_in_use_is_pruned_beside_its_processes_which_go_on(root: Path) -> None:
    with shared_elsewhere(root) as sharer:
        assert sharer.stdin is not None
        assert sharer.stdout is not None
        result = tool("gc", root, "--namespace", digest("two"))
        assert result.exit_code == 0, result.output
        assert f"note: in use by process {sharer.pid} on " in result.stderr
        # Somebody may have the namespace open: its description stays.
        assert (root / f"manifest-{digest('two')}.json").exists()
        assert tool_json("gc", root, "--namespace", digest())["dropped"][0]["blocks"] == 9
        assert block_files(root) == []
        sharer.stdin.write("2000\n")
        sharer.stdin.flush()
        assert int(sharer.stdout.readline()) == 32
        assert tool_json("fsck", root)["whole"] == 32
    assert found(tool_json("fsck", root)) == set()
    assert files_loadable(root, keys(32, start=2000)) == keys(32, start=2000)


def test_a_block_that_was_stored_anew_since_it_was_read_is_not_dropped(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import kvtier_fs.inspect.shared

    raise_epoch(root, digest())
    claims = []
    remove_if = kvtier_fs.inspect.shared.remove_if

    def stored_anew(leaf_fd, name, wrong):
        claims.append(name)
        if len(claims) == 1:
            (path,) = root.rglob(name)
            (root.parent / "anew").write_bytes(path.read_bytes())
            (root.parent / "anew").rename(path)
        return remove_if(leaf_fd, name, wrong)

    monkeypatch.setattr(kvtier_fs.inspect.shared, "remove_if", stored_anew)
    assert tool_json("gc", root, "--old")["dropped"][0]["blocks"] == 4
    assert len(block_files(root)) == 4
    assert next(root.rglob(claims[0]))


def test_a_store_of_many_blocks_is_listed_counted_checked_and_dropped(
    tmp_path: Path, dial: Callable[[int, int], int]
) -> None:
    count = dial(2000, 600)

    async def store(tier) -> None:
        assert all(outcome.ok for outcome in await tier.store(keys(count)))

    run_files(tmp_path / "root", store, capacity=128 << 20)
    assert len(tool("ls", tmp_path / "root").stdout.splitlines()) == count + 1
    assert len(tool_json("ls", tmp_path / "root", "--sort", "key")["blocks"]) == count
    assert tool_json("du", tmp_path / "root", "--by", "region")["total"]["blocks"] == count
    assert tool_json("fsck", tmp_path / "root")["whole"] == count
    assert tool_json("gc", tmp_path / "root", "--namespace", digest())["dropped"][0]["blocks"] == count
    assert found(tool_json("fsck", tmp_path / "root")) == set()


def test_blocks_older_than_an_age_are_dropped(root: Path) -> None:
    path = next(path for path in block_files(root) if path.is_file())
    page = memoryview(bytearray(path.read_bytes()[:4096]))
    header = decode_slot_header(page)
    assert header is not None
    encode_slot_header(header._replace(generation=header.generation - 3 * 86400 * 10**9), page)
    with path.open("r+b") as file:
        file.write(page)
    for age, blocks in (("4d", 0), ("2d", 1), ("2d", 0)):
        dropped = tool_json("gc", root, "--older-than", age)["dropped"]
        assert sum(row["blocks"] for row in dropped) == blocks
    assert len(block_files(root)) == 7
    assert "'2 weeks' is not a time" in refusal("gc", root, "--older-than", "2 weeks")

"""`kvtier ls` and `kvtier du` say what is stored, beside a live owner too, and never change a byte."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from support_fs import Tier, keys, layout, open_tier, options
from support_tools import (
    PAYLOAD,
    SLOT,
    digest,
    owned_elsewhere,
    refusal,
    run_tier,
    tool,
    tool_as_ordinary_user,
    tool_json,
    write,
)

from kvtier.types.keys import key_hash

BLOCK_KEYS = {
    "namespace",
    "epoch",
    "group",
    "key",
    "payload_bytes",
    "stored_bytes",
    "generation",
    "region",
    "slot",
    "state",
    "stored_at",
    "hits",
    "used_at",
}
USAGE_KEYS = {
    "blocks",
    "payload_bytes",
    "stored_bytes",
    "leftover_blocks",
    "leftover_bytes",
    "oldest_generation",
    "newest_generation",
    "oldest_stored_at",
    "newest_stored_at",
    "hits",
}


def two_namespaces(root: Path) -> None:
    """5 blocks of one namespace and, in other slots, 3 of another, tagged `two`."""
    write(root, keys(5))

    async def store(tier: Tier) -> None:
        tier.directory = {bytes([slot]) * 8: (slot, 0) for slot in range(5)}
        await tier.store_all(keys(3, start=70))

    run_tier(root, store, tag="two")


def reset(root: Path) -> None:
    async def work(tier: Tier) -> None:
        await tier.backend.reset(tier.epoch + 1)

    run_tier(root, work)


def test_a_block_is_listed_with_its_place_and_the_beginning_of_its_hash(tmp_path: Path) -> None:
    written = write(tmp_path / "root", keys(3))
    before = written.files
    document = tool_json("ls", written.path)
    assert (document["command"], document["version"], document["layout"]) == ("ls", 1, "slab")
    for number, (key, block) in enumerate(zip(keys(3), document["blocks"], strict=True)):
        assert set(block) == BLOCK_KEYS
        assert block["key"] == key_hash(key).hex()[:12]
        assert (block["namespace"], block["group"], block["state"]) == (digest(), 0, "current")
        assert (block["payload_bytes"], block["stored_bytes"]) == (PAYLOAD, SLOT)
        assert (block["region"], block["slot"], block["generation"]) == (0, number, number + 1)
        # This layout keeps neither on disk, and says so.
        assert (block["stored_at"], block["hits"]) == (None, None)
    assert "not kept on disk" in document["notes"][0]
    heading, *lines = tool("ls", written.path).stdout.splitlines()
    assert heading.split() == ["namespace", "group", "key", "size", "generation", "region", "slot", "state"]
    assert lines[1].split() == [
        digest()[:12],
        "0",
        key_hash(keys(3)[1]).hex()[:12],
        "16",
        "KiB",
        "2",
        "0",
        "1",
        "current",
    ]
    assert written.files == before


def test_whole_hashes_are_printed_only_when_asked_for(tmp_path: Path) -> None:
    written = write(tmp_path / "root", keys(2))
    hashes = [key_hash(key).hex() for key in keys(2)]
    for arguments in ((), ("--json",)):
        assert not any(whole[:13] in tool("ls", written.path, *arguments).output for whole in hashes)
        assert all(whole in tool("ls", written.path, "--full", *arguments).output for whole in hashes)


def test_blocks_are_sorted_filtered_and_limited(tmp_path: Path) -> None:
    two_namespaces(tmp_path / "root")
    root = tmp_path / "root"

    def listed(*arguments: str) -> list[dict]:  # type: ignore[type-arg]
        return tool_json("ls", root, *arguments)["blocks"]

    assert [block["slot"] for block in listed()] == list(range(8))
    assert [block["slot"] for block in listed("--reverse", "--limit", "2")] == [7, 6]
    assert [block["slot"] for block in listed("--limit", "3")] == [0, 1, 2]
    generations = [block["generation"] for block in listed("--sort", "generation")]
    assert generations == sorted(generations) == [1, 1, 2, 2, 3, 3, 4, 5]
    assert [block["key"] for block in listed("--sort", "key")] == sorted(block["key"] for block in listed())
    names = [block["namespace"] for block in listed("--sort", "namespace")]
    assert names == sorted(names)
    assert len(listed("--namespace", digest("two")[:6])) == 3
    assert listed("--namespace", "ffff") == []


def test_what_can_no_longer_be_loaded_is_listed_when_asked_for(tmp_path: Path) -> None:
    write(tmp_path / "root", keys(4))
    reset(tmp_path / "root")
    assert tool_json("ls", tmp_path / "root")["blocks"] == []
    assert [block["state"] for block in tool_json("ls", tmp_path / "root", "--all")["blocks"]] == ["old"] * 4
    (row,) = tool_json("du", tmp_path / "root")["rows"]
    assert (row["blocks"], row["leftover_blocks"], row["leftover_bytes"]) == (0, 4, 4 * SLOT)
    assert (row["oldest_generation"], row["newest_generation"]) == (None, None)


def test_usage_is_added_up_by_namespace(tmp_path: Path) -> None:
    two_namespaces(tmp_path / "root")
    document = tool_json("du", tmp_path / "root")
    assert document["by"] == "namespace"
    rows = {row["namespace"]: row for row in document["rows"]}
    assert set(rows) == {digest(), digest("two")}
    one, two = rows[digest()], rows[digest("two")]
    assert set(one) == USAGE_KEYS | {"namespace", "epoch", "session", "opened_at", "model", "tag"}
    assert (one["blocks"], one["payload_bytes"], one["stored_bytes"]) == (5, 5 * PAYLOAD, 5 * SLOT)
    assert (one["oldest_generation"], one["newest_generation"]) == (1, 5)
    assert (one["tag"], two["tag"], one["session"], two["session"]) == ("", "two", 1, 2)
    assert two["opened_at"] == (tmp_path / "root" / f"manifest-{digest('two')}.json").stat().st_mtime
    assert set(document["total"]) == USAGE_KEYS
    assert (document["total"]["blocks"], document["total"]["hits"]) == (8, None)
    text = tool("du", tmp_path / "root").stdout
    assert digest("two") in text
    assert "hit is not kept on disk" in text


def test_usage_is_added_up_by_group_and_by_region(tmp_path: Path) -> None:
    async def store() -> None:
        async with open_tier(options(tmp_path / "root", region_bytes="1MiB"), layout(PAYLOAD, 8192)) as tier:
            await tier.store(keys(3), [tier.format_region(0, 0)])
            await tier.store(keys(4, group=1), [tier.format_region(2, 1)])

    asyncio.run(store())
    space = digest("", PAYLOAD, 8192)
    groups = tool_json("du", tmp_path / "root", "--by", "group")["rows"]
    assert [(row["namespace"], row["group"], row["blocks"]) for row in groups] == [(space, 0, 3), (space, 1, 4)]
    assert set(groups[0]) == USAGE_KEYS | {"namespace", "group"}
    regions = tool_json("du", tmp_path / "root", "--by", "region")["rows"]
    assert [(row["region"], row["blocks"]) for row in regions] == [(0, 3), (2, 4)]
    assert set(regions[0]) == USAGE_KEYS | {"region"}
    assert [line.split()[0] for line in tool("du", tmp_path / "root", "--by", "region").stdout.splitlines()[:4]] == [
        "region",
        "0",
        "2",
        "total",
    ]


def test_a_manifest_of_unknown_origin_cannot_harm_the_terminal_or_the_tool(tmp_path: Path) -> None:
    written = write(tmp_path / "root")
    manifest = written.path / f"manifest-{digest()}.json"
    for text in ('{"model": "a\x1b[2Jb", "tag": []}', '{"model": "\\u001b[2J", "tag": "x"}', "[" * 50000, "", "\xff"):
        manifest.write_bytes(text.encode("latin-1"))
        result = tool("du", written.path)
        assert result.exit_code == 0
        assert "\x1b" not in result.output


def test_a_live_root_is_read_beside_its_owner_who_is_named(tmp_path: Path) -> None:
    with owned_elsewhere(tmp_path / "root") as owner:
        for command in ("ls", "du"):
            result = tool(command, tmp_path / "root")
            assert result.exit_code == 0, result.output
            assert f"note: in use by process {owner} on " in result.stderr
            document = tool_json(command, tmp_path / "root")
            assert document["owner"].startswith(f"process {owner} on ")
        assert len(tool_json("ls", tmp_path / "root")["blocks"]) == 4
        assert tool_json("du", tmp_path / "root")["total"]["blocks"] == 4
    assert tool_json("ls", tmp_path / "root")["owner"] is None


@pytest.mark.parametrize("command", ["ls", "du"])
def test_what_cannot_be_read_is_one_line(tmp_path: Path, command: str) -> None:
    (tmp_path / "empty").mkdir(mode=0o700)
    assert "holds no store of blocks" in refusal(command, tmp_path / "empty")
    assert "is not there" in refusal(command, tmp_path / "absent")
    written = write(tmp_path / "root")
    (tmp_path / "link").symlink_to(written.path)
    assert "is a symbolic link" in refusal(command, tmp_path / "link")
    assert refusal(command, written.path, "--nonsense").startswith("error: No such option")
    written.path.chmod(0o000)
    done = tool_as_ordinary_user(command, written.path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "no permission" in done.stderr
    written.path.chmod(0o700)


def test_a_store_of_many_blocks_is_listed_counted_and_checked(tmp_path: Path, dial: Callable[[int, int], int]) -> None:
    count = dial(20_000, 5000)

    async def store() -> None:
        async with open_tier(options(tmp_path / "root", capacity="256MiB"), layout(4096), rows=4096) as tier:
            await tier.store_all(keys(count))

    asyncio.run(store())
    assert len(tool("ls", tmp_path / "root").stdout.splitlines()) == count + 1
    assert len(tool_json("ls", tmp_path / "root", "--sort", "key")["blocks"]) == count
    assert tool_json("du", tmp_path / "root", "--by", "region")["total"]["blocks"] == count
    assert tool_json("fsck", tmp_path / "root")["whole"] == count

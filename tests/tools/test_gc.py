"""`kvtier gc` drops what it was told to and nothing else, for good; a slip of the finger drops nothing."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from support_fs import Tier, keys
from support_tools import SLOT, digest, loadable, owned_elsewhere, refusal, run_tier, tool, tool_json, write

ONE, TWO = keys(5), keys(3, start=70)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """5 blocks of one namespace and 3 of another, tagged `two`, side by side."""
    write(tmp_path / "root", ONE)

    async def store(tier: Tier) -> None:
        tier.directory = {bytes([slot]) * 8: (slot, 0) for slot in range(5)}
        await tier.store_all(TWO)

    run_tier(tmp_path / "root", store, tag="two")
    return tmp_path / "root"


def contents(root: Path) -> dict[str, bytes]:
    """Every file but the lock, whose text names who held it last."""
    return {path.name: path.read_bytes() for path in root.iterdir() if path.name != "lock"}


def test_a_namespace_is_dropped_and_the_others_stay(root: Path) -> None:
    document = tool_json("gc", root, "--namespace", digest("two"))
    assert (document["command"], document["version"], document["dry_run"]) == ("gc", 1, False)
    assert document["dropped"] == [{"namespace": digest("two"), "blocks": 3, "stored_bytes": 3 * SLOT}]
    assert tool_json("fsck", root)["whole"] == 5
    assert not (root / f"manifest-{digest('two')}.json").exists()
    assert (root / f"manifest-{digest()}.json").exists()
    assert loadable(root, tag="two") == []
    assert loadable(root) == ONE


def test_all_but_a_namespace_are_dropped(root: Path) -> None:
    result = tool("gc", root, "--all-but", digest("two")[:8])
    assert result.exit_code == 0
    assert result.stdout.split() == ["namespace", "dropped", "on", "disk", digest(), "5", "100", "KiB"]
    assert loadable(root) == []
    assert loadable(root, tag="two") == TWO


def test_several_namespaces_can_be_named(root: Path) -> None:
    document = tool_json("gc", root, "--all-but", digest(), "--all-but", digest("two"))
    assert document["dropped"] == []
    document = tool_json("gc", root, "--namespace", digest(), "--namespace", digest("two"))
    assert sum(row["blocks"] for row in document["dropped"]) == 8
    assert tool_json("fsck", root)["whole"] == 0


def test_what_can_no_longer_be_loaded_is_dropped(root: Path) -> None:
    async def reset(tier: Tier) -> None:
        await tier.backend.reset(tier.epoch + 1)

    run_tier(root, reset)
    assert tool_json("gc", root, "--old")["dropped"] == [{"namespace": digest(), "blocks": 5, "stored_bytes": 5 * SLOT}]
    document = tool_json("fsck", root)
    assert (document["whole"], document["counts"]) == (3, [])
    assert loadable(root, tag="two") == TWO
    assert tool("gc", root, "--old").stdout == "there is nothing to drop\n"


def test_a_dry_run_says_the_same_and_changes_nothing(root: Path) -> None:
    before = contents(root)
    document = tool_json("gc", root, "--namespace", digest("two"), "--dry-run")
    assert document["dry_run"]
    assert document["dropped"] == [{"namespace": digest("two"), "blocks": 3, "stored_bytes": 3 * SLOT}]
    assert "would be dropped" in tool("gc", root, "--all-but", digest("two"), "--dry-run").stdout
    assert contents(root) == before


def test_a_namespace_that_is_not_known_drops_nothing(root: Path) -> None:
    before = contents(root)
    for option in ("--namespace", "--all-but"):
        assert "no namespace begins with 'ffffff'" in refusal("gc", root, option, "ffffff")
        assert "no namespace begins with" in refusal("gc", root, option, digest("two")[:-1] + "g")
        assert "is too short" in refusal("gc", root, option, digest()[:3])
        assert "is too short" in refusal("gc", root, option, "")
    assert contents(root) == before


def test_a_store_without_times_is_not_pruned_by_age(root: Path) -> None:
    before = contents(root)
    assert "does not keep when its blocks were stored" in refusal("gc", root, "--older-than", "1s")
    assert contents(root) == before


def dated(root: Path, ages_days: list[float]) -> None:
    """Add a block for each of these ages to the root of namespace `three`."""

    async def store(tier: Tier) -> None:
        tier.directory = {bytes([slot]) * 8: (slot, 0) for slot in range(8)}
        for number, days in enumerate(ages_days):
            tier.generation = time.time_ns() - int(days * 86400e9)
            await tier.store_all(keys(1, start=200 + number))

    run_tier(root, store, tag="three")


def test_what_was_stored_longer_ago_is_dropped_and_what_has_no_time_stays(root: Path) -> None:
    dated(root, [9, 8, 6.9, 0])
    before = contents(root)
    document = tool_json("gc", root, "--older-than", "7d", "--dry-run")
    gone = [{"namespace": digest("three"), "blocks": 2, "stored_bytes": 2 * SLOT}]
    assert (document["dropped"], contents(root)) == (gone, before)
    result = tool("gc", root, "--older-than", "7d")
    assert result.exit_code == 0
    assert digest("three") in result.stdout
    assert result.stderr == "note: 8 blocks stay that do not say when they were stored\n"
    assert loadable(root, tag="three") == keys(2, start=202)
    assert (loadable(root), loadable(root, tag="two")) == (ONE, TWO)
    assert tool("gc", root, "--older-than", "7d").stdout == "there is nothing to drop\n"
    stored = [block["stored_at"] for block in tool_json("ls", root)["blocks"]]
    assert sorted(round((time.time() - at) / 86400, 1) for at in stored if at is not None) == [0.0, 6.9]
    assert stored.count(None) == 8


def test_exactly_one_way_to_choose_is_asked_for(root: Path) -> None:
    before = contents(root)
    assert "give one of" in refusal("gc", root)
    assert "give one of" in refusal("gc", root, "--old", "--namespace", digest())
    assert contents(root) == before


def test_a_live_root_is_refused_with_the_name_of_its_owner(tmp_path: Path) -> None:
    with owned_elsewhere(tmp_path / "root") as owner:
        for arguments in (("--old",), ("--namespace", digest()), ("--older-than", "1s"), ("--old", "--dry-run")):
            assert f"in use by process {owner} on " in refusal("gc", tmp_path / "root", *arguments)
    assert tool_json("fsck", tmp_path / "root")["whole"] == 4


def test_what_cannot_be_opened_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir(mode=0o700)
    assert "holds no store of blocks" in refusal("gc", tmp_path / "empty", "--old")
    assert list((tmp_path / "empty").iterdir()) == []
    assert "is not there" in refusal("gc", tmp_path / "absent", "--old")

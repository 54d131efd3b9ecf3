"""Any backend may offer its stores to the tools: by an inspector among the entry points, and the core names none."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support_backends import Idle, add_distribution, inspectors_in
from support_tools import tool, tool_json, write

from kvtier.errors import ConfigError, RootBusyError, RootError
from kvtier.tier.inspection import (
    Access,
    BlockState,
    CheckStep,
    Finding,
    FindingKind,
    Inspectors,
    Inspects,
    InspectsServers,
    ListStep,
    StoreAbout,
    StoredBlock,
    find_store,
)
from kvtier.types.keys import make_key

NAMESPACE = bytes(range(16))
GROUP = "kvtier.inspectors"


class Shelf:
    """A store that is a file of JSON: a list of generations. It keeps times and hits."""

    def __init__(self, path: Path, access: Access) -> None:
        self.path = path
        self.access = access
        self.closed = 0
        self.about = StoreAbout(str(path.parent), "shelf", "ab", 3, 1, 300, 1, True, "", (), ("made of wood",))

    def _block(self, generation: int) -> StoredBlock:
        key = make_key(bytes([generation]) * 8, 0)
        places = (0, generation, generation)
        return StoredBlock(BlockState.CURRENT, NAMESPACE, 0, key, *places, 90, 100, 1e9 + generation, 10 * generation)

    def blocks(self) -> Iterator[ListStep]:
        yield ListStep(3, [self._block(generation) for generation in json.loads(self.path.read_text())])

    def check(self, repair: bool) -> Iterator[CheckStep]:
        yield CheckStep(3, 1, 1, 90, [Finding(FindingKind.CORRUPT, "wormhole", "shelf, board 2", repair)])

    def drop(self, chosen: Callable[[StoredBlock], bool]) -> Iterator[ListStep]:
        assert self.access is Access.CHANGE
        (listed,) = self.blocks()
        self.path.write_text(json.dumps([block.generation for block in listed.blocks if not chosen(block)]))
        yield ListStep(3, [block for block in listed.blocks if chosen(block)])

    def close(self) -> None:
        self.closed += 1


class ShelfTier(Idle):
    @classmethod
    def inspect(cls, root: str, access: Access) -> Shelf | None:
        path = Path(root) / "shelf.json"
        return Shelf(path, access) if path.exists() else None


class BusyTier(Idle):
    @classmethod
    def inspect(cls, root: str, access: Access) -> None:
        raise RootBusyError(root, "the night shift")


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store of another distribution's backend, which is installed beside our own."""
    add_distribution(tmp_path / "site", "wood-tier", {"shelf": f"{__name__}:ShelfTier"}, group=GROUP)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    root = tmp_path / "store"
    root.mkdir()
    (root / "shelf.json").write_text("[1, 2]")
    return root


def test_each_tier_that_keeps_blocks_has_an_inspector() -> None:
    inspectors = Inspectors.find()
    folders = {name for name in inspectors.names if isinstance(inspectors.get(name), Inspects)}
    servers = {name for name in inspectors.names if isinstance(inspectors.get(name), InspectsServers)}
    assert folders == {"fs", "shared_fs"}
    assert servers == {"valkey", "mooncake", "s3", "gcs", "azure"}


def test_what_is_no_inspector_is_refused_naming_its_distribution(tmp_path: Path) -> None:
    add_distribution(tmp_path, "half", {"idle": "support_backends:Idle"}, group=GROUP)
    with pytest.raises(ConfigError, match=r"'idle' of half 1\.0 does not keep the contract"):
        inspectors_in(tmp_path).get("idle")


def test_the_store_of_another_backend_is_listed_with_what_it_keeps(shelf: Path) -> None:
    blocks = tool_json("ls", shelf)["blocks"]
    assert [(block["generation"], block["hits"], block["stored_at"]) for block in blocks] == [
        (1, 10, 1e9 + 1),
        (2, 20, 1e9 + 2),
    ]
    assert "20 hits" in tool("ls", shelf).stdout
    total = tool_json("du", shelf)["total"]
    assert (total["blocks"], total["hits"], total["oldest_stored_at"], total["newest_stored_at"]) == (
        2,
        30,
        1e9 + 1,
        1e9 + 2,
    )
    text = tool("du", shelf).stdout
    assert "oldest stored" in text
    assert "made of wood" in text


def test_the_store_of_another_backend_is_checked_and_pruned(shelf: Path) -> None:
    assert tool_json("fsck", shelf, status=1)["findings"][0]["where"] == "shelf, board 2"
    assert tool_json("fsck", shelf, "--repair")["damaged"] == 0
    assert tool_json("gc", shelf, "--namespace", NAMESPACE.hex())["dropped"][0]["blocks"] == 2
    assert (shelf / "shelf.json").read_text() == "[]"


def test_each_inspector_of_folders_is_tried_and_the_first_that_reads_the_store_serves(tmp_path: Path) -> None:
    points = {
        "a": "kvtier_remote.valkey.listing:INSPECTOR",
        "b": f"{__name__}:ShelfTier",
        "fs": "kvtier_fs.inspect.local:LocalInspection",
    }
    add_distribution(tmp_path / "site", "several", points, group=GROUP)
    inspectors = inspectors_in(tmp_path / "site")
    written = write(tmp_path / "root")
    store = find_store(str(written.path), Access.READ, inspectors)
    assert store.about.layout == "slab"
    store.close()
    (tmp_path / "empty").mkdir(mode=0o700)
    with pytest.raises(RootError, match=r"\(tried: b, fs\)"):
        find_store(str(tmp_path / "empty"), Access.READ, inspectors)


def test_an_inspector_that_cannot_be_loaded_does_not_keep_the_others_from_reading(tmp_path: Path) -> None:
    points = {"broken": "no_such_module:X", "server": "kvtier_remote.valkey.listing:INSPECTOR"}
    add_distribution(tmp_path / "site", "half", points, group=GROUP)
    with pytest.raises(RootError, match=r"\(tried: none; cannot be loaded: broken\)"):
        find_store(str(tmp_path), Access.READ, inspectors_in(tmp_path / "site"))


def test_what_kept_an_inspector_from_reading_is_raised_unless_another_reads_the_store(tmp_path: Path) -> None:
    points = {"busy": f"{__name__}:BusyTier", "shelf": f"{__name__}:ShelfTier"}
    add_distribution(tmp_path / "site", "both", points, group=GROUP)
    inspectors = inspectors_in(tmp_path / "site")
    with pytest.raises(RootBusyError, match="the night shift"):
        find_store(str(tmp_path), Access.CHECK, inspectors)
    (tmp_path / "shelf.json").write_text("[]")
    assert find_store(str(tmp_path), Access.CHECK, inspectors).about.layout == "shelf"

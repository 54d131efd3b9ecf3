"""A root whose modes the environment has changed, as the kubelet does for a pod with `fsGroup`: used, or refused."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest
import support_files
import support_fs
from support_protections_fs import without_owner_check

from kvtier.errors import KVTierError, RootError
from kvtier.tier.inspection import Access, Inspectors, find_store
from kvtier.types.keys import OffloadKey
from kvtier_fs.local.tier import FSBackend
from kvtier_fs.roots.private_tree import PrivateTree
from kvtier_fs.shared.tier import SharedFSBackend

NOTE = "others were allowed to write into it"
OTHER_USER = 12_345
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")


class Layout:
    """One layout: how its tier is opened, and what it stores and loads."""

    def __init__(self, name: str) -> None:
        self.support = support_fs if name == "fs" else support_files
        self.backend = FSBackend if name == "fs" else SharedFSBackend
        self.keys: list[OffloadKey] = support_fs.keys(6)

    def open(self, root: Path) -> AbstractAsyncContextManager[object]:
        settings = self.support.options(root)
        return support_fs.open_tier(settings) if self.support is support_fs else support_files.open_files(settings)

    async def fill(self, root: Path) -> None:
        async with self.open(root) as tier:
            await (tier.store_all(self.keys) if self.support is support_fs else tier.store(self.keys))

    async def loaded(self, root: Path) -> tuple[int, list[str]]:
        """How many blocks a new opening loads, and its notes."""
        async with self.open(root) as tier:
            outcomes = await (tier.load_all(self.keys) if self.support is support_fs else tier.load(self.keys))
            return sum(one.ok for one in outcomes), list(tier.opened.notes)


@pytest.fixture(params=["fs", "shared_fs"])
def layout(request: pytest.FixtureRequest) -> Layout:
    return Layout(request.param)


def everything(root: Path) -> list[Path]:
    return [root, *sorted(root.rglob("*"))]


def mount(root: Path) -> None:
    """What the kubelet does to a volume of a pod with `fsGroup`."""
    for path in everything(root):
        mode = stat.S_IMODE(path.lstat().st_mode)
        path.chmod(mode | (0o2770 if path.is_dir() else 0o660))


def modes(root: Path) -> set[tuple[bool, int]]:
    return {(path.is_dir(), stat.S_IMODE(path.lstat().st_mode)) for path in everything(root)}


async def refusal(layout: Layout, root: Path) -> str:
    with pytest.raises(KVTierError) as caught:
        await layout.loaded(root)
    return str(caught.value)


async def test_a_root_is_found_again_however_often_its_modes_are_changed(layout: Layout, tmp_path: Path) -> None:
    root = tmp_path / "root"
    await layout.fill(root)
    for _ in range(50):
        mount(root)
        hits, notes = await layout.loaded(root)
        assert hits == len(layout.keys)
        assert sum(NOTE in note for note in notes) == 1
        assert modes(root) == {(True, 0o700), (False, 0o600)}
    assert not any(NOTE in note for note in (await layout.loaded(root))[1])


async def test_a_root_that_was_not_made_private_to_the_end_is_looked_at_again(
    layout: Layout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "root"
    await layout.fill(root)
    mount(root)
    walk = PrivateTree._walk

    def killed(tree: PrivateTree, folder_fd: int, where: str, make_private: bool) -> None:
        walk(tree, folder_fd, where, make_private)
        if make_private:
            raise OSError(5, "killed")

    with monkeypatch.context() as killing:
        killing.setattr(PrivateTree, "_walk", killed)
        await refusal(layout, root)
    assert stat.S_IMODE(root.stat().st_mode) == 0o1700, "no other user can enter, and it does not count as private"
    hits, notes = await layout.loaded(root)
    assert hits == len(layout.keys)
    assert any(NOTE in note for note in notes)
    assert modes(root) == {(True, 0o700), (False, 0o600)}


async def test_a_tool_that_only_reads_changes_no_mode(layout: Layout, tmp_path: Path) -> None:
    root = tmp_path / "root"
    await layout.fill(root)
    mount(root)
    before = modes(root)
    inspection = find_store(str(root), Access.READ, Inspectors.find())
    listed = sum(len(step.blocks) for step in inspection.blocks())
    inspection.close()
    assert listed == len(layout.keys)
    assert modes(root) == before


async def test_a_link_in_the_root_is_not_followed(layout: Layout, tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    await layout.fill(root)
    outside.write_bytes(b"precious")
    outside.chmod(0o644)
    (root / "a-link").symlink_to(outside)
    mount_but_links = [path for path in everything(root) if not path.is_symlink()]
    for path in mount_but_links:
        path.chmod(0o2770 if path.is_dir() else 0o660)
    assert (await layout.loaded(root))[0] == len(layout.keys)
    assert stat.S_IMODE(outside.stat().st_mode) == 0o644


async def test_files_of_others_keep_their_modes(layout: Layout, tmp_path: Path) -> None:
    root = tmp_path / "root"
    await layout.fill(root)
    (root / "readme").write_text("of this user, and not kvtier's")
    mount(root)
    assert (await layout.loaded(root))[0] == len(layout.keys)
    assert stat.S_IMODE((root / "readme").stat().st_mode) == 0o664


def own_file(root: Path) -> Path:
    return max((path for path in root.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def give_a_file_away(root: Path) -> None:
    os.chown(own_file(root), OTHER_USER, -1)


def link_a_file_elsewhere(root: Path) -> None:
    os.link(own_file(root), root.parent / "elsewhere")


def let_everybody_write(root: Path) -> None:
    root.chmod(0o777)


REFUSED: list[tuple[Callable[[Path], None], str]] = [
    (give_a_file_away, f"belongs to another user ({OTHER_USER})"),
    (link_a_file_elsewhere, "has another name elsewhere"),
    (let_everybody_write, "not only its group"),
]


@pytest.mark.parametrize(("change", "reason"), REFUSED, ids=lambda one: getattr(one, "__name__", ""))
async def test_what_is_not_this_users_alone_is_refused_and_left_as_it_is(
    layout: Layout, tmp_path: Path, change: Callable[[Path], None], reason: str
) -> None:
    if change is give_a_file_away and os.geteuid() != 0:
        pytest.skip("only root can give files to another user")
    root = tmp_path / "root"
    await layout.fill(root)
    mount(root)
    change(root)
    before = modes(root)
    message = await refusal(layout, root)
    assert reason in message
    assert all(text in message for text in ("chmod go-w", "fsGroupChangePolicy: OnRootMismatch", "subfolder"))
    assert modes(root) == before


async def test_a_file_with_two_names_in_the_root_is_this_users(layout: Layout, tmp_path: Path) -> None:
    """As a crash leaves the superblock of a shared root while it is made."""
    root = tmp_path / "root"
    await layout.fill(root)
    os.link(root / "superblock", root / f"new-{'0' * 16}-1")
    mount(root)
    assert (await layout.loaded(root))[0] == len(layout.keys)


async def test_a_folder_that_kvtier_has_not_made_stays_refused(layout: Layout, tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (root / "theirs").write_text("")
    mount(root)
    assert "no root that kvtier has made" in await refusal(layout, root)


@AS_ROOT
async def test_another_users_file_is_made_this_ones_without_the_check(
    layout: Layout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check switched off: a root with a file that another user may change at any moment is used."""
    root = tmp_path / "root"
    await layout.fill(root)
    mount(root)
    give_a_file_away(root)
    with pytest.raises(RootError, match="belongs to another user"):
        await layout.loaded(root)
    without_owner_check(monkeypatch)
    await layout.loaded(root)
    assert own_file(root).stat().st_uid == OTHER_USER

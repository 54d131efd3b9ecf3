"""Something else in the place of a file: truncated, of another root or release, no file at all. A miss or a refusal."""

from __future__ import annotations

import os
import random
import shutil
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import xxhash

from kvtier.tier_api.block_envelope import decode_slot_header, encode_slot_header
from kvtier.types.jobs import JobKind
from kvtier.types.keys import OffloadKey, make_key

from ..attack import Budget, Tally
from .stored import HEADER, LAYOUTS, SLOT, Found, Stored, held, load, opened, run, stored

BLOCKS = 8
PAGE = 4096
VERSION_AT = 24


@dataclass(frozen=True, slots=True)
class Scene:
    """What a case uses: a root as it was written, another root with the same keys, a foreign file."""

    root: Stored
    other: Stored
    victim: Path
    rng: random.Random

    @property
    def first(self) -> OffloadKey:
        return self.root.names[0]

    @property
    def block(self) -> Path:
        """The file that the first block lies in."""
        return self.root.places[self.first][0]

    @property
    def at(self) -> int:
        """Where in it the first block begins."""
        return self.root.places[self.first][1]

    def path(self, name: str) -> Path:
        """A file of the root. `epoch` and `account` stand for the one of the namespace and of the first bucket."""
        if name == "block":
            return self.block
        if name == "epoch":
            return self.root.root / next(
                one for one in self.root.pristine if one.startswith("epochs/") and len(one) == 39
            )
        if name in ("account", "lock of the bucket"):
            return self.bucket / name.partition(" ")[0]
        return self.root.root / name

    @property
    def bucket(self) -> Path:
        """The bucket that the first block lies in."""
        return self.root.root / self.block.relative_to(self.root.root).parts[0]

    def same_of_other(self, path: Path) -> Path:
        """The file of the other root that stands for this one of ours."""
        if path == self.block:
            return self.other.places[self.first][0]
        return self.other.root / path.relative_to(self.root.root)


Plant = Callable[[Scene, Path], object]


def _truncate(scene: Scene, path: Path) -> None:
    os.truncate(path, scene.rng.randrange(path.stat().st_size))


def _extend(scene: Scene, path: Path) -> None:
    with path.open("ab") as file:
        file.write(scene.rng.randbytes(scene.rng.randrange(1, 20_000)))


def _zero(scene: Scene, path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def _noise(scene: Scene, path: Path) -> None:
    path.write_bytes(scene.rng.randbytes(path.stat().st_size))


def _other_roots(scene: Scene, path: Path) -> None:
    shutil.copyfile(scene.same_of_other(path), path)


def _remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)


def _link(scene: Scene, path: Path) -> None:
    """What was there lies elsewhere now, and a link leads to it."""
    _remove(scene.victim)
    path.rename(scene.victim)
    path.symlink_to(scene.victim)


def _device(scene: Scene, path: Path) -> None:
    _remove(path)
    path.symlink_to("/dev/zero")


def _pipe(scene: Scene, path: Path) -> None:
    _remove(path)
    os.mkfifo(path, 0o600)


def _folder(scene: Scene, path: Path) -> None:
    _remove(path)
    path.mkdir(mode=0o700)
    if scene.rng.random() < 0.5:
        (path / "precious").write_text("precious")


def _socket(scene: Scene, path: Path) -> None:
    _remove(path)
    with socket.socket(socket.AF_UNIX) as server, _inside(path.parent):
        server.bind(path.name)  # by its short name: the address of a socket takes a hundred characters


class _inside:  # a context manager, used as one
    def __init__(self, folder: Path) -> None:
        self._folder, self._was = folder, os.getcwd()

    def __enter__(self) -> None:
        os.chdir(self._folder)

    def __exit__(self, *_: object) -> None:
        os.chdir(self._was)


def _file(scene: Scene, path: Path) -> None:
    _remove(path)
    path.write_bytes(b"precious")


def _seal(page: bytearray) -> bytes:
    page[8:24] = xxhash.xxh3_128_digest(bytes(page[24:]))
    return bytes(page)


def _version(by: int, at: int = 0, size: int = PAGE) -> Plant:
    """Another version under a checksum that holds, in as many copies as the file has."""

    def plant(scene: Scene, path: Path) -> None:
        data = bytearray(path.read_bytes())
        step = len(data) if size == 0 else size
        ends = range(at, len(data), step) if at == 0 and path.name == "superblock" else range(at, at + step, step)
        for start in ends:
            page = data[start : start + step]
            value = int.from_bytes(page[VERSION_AT : VERSION_AT + 4], "little") + by
            page[VERSION_AT : VERSION_AT + 4] = value.to_bytes(4, "little")
            data[start : start + step] = _seal(page)
        path.write_bytes(data)

    return plant


def _block_version(by: int) -> Plant:
    return lambda scene, path: _version(by, scene.at)(scene, path)


def _epoch_version(scene: Scene, path: Path) -> None:
    half = bytearray(path.read_bytes()[:128])
    half[VERSION_AT] ^= 1
    path.write_bytes(_seal(half) * 2)


def _forge(**changes: object) -> Plant:
    """Fields of the first block's header changed under a checksum that holds."""

    def plant(scene: Scene, path: Path) -> None:
        page = memoryview(bytearray(path.read_bytes()[scene.at : scene.at + HEADER]))
        header = decode_slot_header(page)
        assert header is not None
        encode_slot_header(header._replace(**changes), page)
        _poke(path, scene.at, bytes(page))

    return plant


def _poke(path: Path, at: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


def _another_block(scene: Scene, path: Path) -> None:
    """The whole of the second block in the place of the first."""
    second, at = scene.root.places[scene.root.names[1]]
    _poke(path, scene.at, second.read_bytes()[at : at + SLOT])


def _another_payload(scene: Scene, path: Path) -> None:
    second, at = scene.root.places[scene.root.names[1]]
    _poke(path, scene.at + HEADER, second.read_bytes()[at + HEADER : at + SLOT])


def _others_block(scene: Scene, path: Path) -> None:
    """The same block as another root has it."""
    theirs, at = scene.other.places[scene.first]
    _poke(path, scene.at, theirs.read_bytes()[at : at + SLOT])


def _hard_link(scene: Scene, path: Path) -> None:
    path.unlink()
    path.hardlink_to(scene.root.places[scene.root.names[1]][0])


def _move_away(scene: Scene, path: Path) -> None:
    """The first block's file, in a bucket that is not its own."""
    elsewhere = next(one for one in sorted(scene.root.root.glob("bucket-*")) if one != scene.bucket)
    path.rename(elsewhere / path.name)


def _mode(mode: int) -> Plant:
    return lambda scene, path: path.chmod(mode)


def _owner(scene: Scene, path: Path) -> None:
    os.chown(path, 12_345, 12_345)


@dataclass(frozen=True, slots=True)
class Case:
    """One thing in the place of another. `missed`: `first` block, all in its `bucket`, `all`, `none` of them, `any`;
    `refused`: the root is, in words. Whatever is not missed must load."""

    layout: str
    name: str
    what: str
    plant: Plant
    missed: str = "first"


def _no_files(layout: str, name: str, missed: str) -> list[Case]:
    """What is no plain file at all."""
    plants: tuple[tuple[str, Plant], ...] = (
        ("a link", _link),
        ("a link to a device", _device),
        ("a pipe", _pipe),
        ("a folder", _folder),
        ("a socket", _socket),
    )
    return [Case(layout, name, what, plant, missed) for what, plant in plants]


def _slab_cases() -> list[Case]:
    slab, block, snapshot = "slab-00000", "superblock", "snapshot"
    cases = [case for name in (slab, block, "lock") for case in _no_files("slab", name, "refused")]
    cases += _no_files("slab", snapshot, "any")
    rows: tuple[tuple[str, str, Plant, str], ...] = (
        (slab, "truncated", _truncate, "any"),
        (slab, "empty", lambda scene, path: os.truncate(path, 0), "all"),
        (slab, "extended", _extend, "none"),
        (slab, "zeroed", _zero, "all"),
        (slab, "noise", _noise, "all"),
        (slab, "gone", lambda scene, path: path.unlink(), "all"),
        (slab, "another root's", _other_roots, "all"),
        (slab, "of others' mode", _mode(0o666), "none"),
        (slab, "of an older format", _version(-1), "all"),
        (slab, "of a newer format", _version(1), "all"),
        (slab, "another block in a slot", _another_block, "first"),
        (slab, "another payload in a slot", _another_payload, "first"),
        (slab, "another root's slot", _others_block, "first"),
        (slab, "another namespace's slot", _forge(namespace=b"x" * 16), "first"),
        (slab, "another epoch's slot", _forge(epoch=7), "first"),
        (slab, "another format's slot", _forge(region_generation=9), "first"),
        (slab, "another group's slot", _forge(key=make_key(b"k" * 32, 1), group=1), "first"),
        (slab, "a slot of an older format", _block_version(-1), "first"),
        (slab, "a slot of a newer format", _block_version(1), "first"),
        (slab, "a slot that was punched out", lambda scene, path: _poke(path, scene.at, bytes(SLOT)), "first"),
        (block, "truncated", lambda scene, path: os.truncate(path, scene.rng.randrange(PAGE)), "all"),
        (block, "truncated to one copy", lambda scene, path: os.truncate(path, PAGE), "none"),
        (block, "extended", _extend, "none"),
        (block, "zeroed", _zero, "all"),
        (block, "noise", _noise, "all"),
        (block, "gone", lambda scene, path: path.unlink(), "all"),
        (block, "another root's", _other_roots, "all"),
        (block, "of an older format", _version(-1), "refused"),
        (block, "of a newer format", _version(1), "refused"),
        (snapshot, "truncated", _truncate, "none"),
        (snapshot, "extended", _extend, "none"),
        (snapshot, "zeroed", _zero, "none"),
        (snapshot, "another root's", _other_roots, "none"),
        (snapshot, "of an older format", _version(-1, 0, 0), "none"),
        (snapshot, "of a newer format", _version(1, 0, 0), "none"),
        ("lock", "noise", _noise, "none"),
        (".", "a folder others may write into", _mode(0o777), "refused"),
        (".", "another user's folder", _owner, "refused"),
    )
    return cases + [Case("slab", *row) for row in rows]


def _files_cases() -> list[Case]:
    cases = _no_files("files", "block", "first")
    cases += _no_files("files", "superblock", "refused") + _no_files("files", "epoch", "refused")
    cases += [case for name in ("account", "lock of the bucket") for case in _no_files("files", name, "none")]
    rows: tuple[tuple[str, str, Plant, str], ...] = (
        ("block", "truncated", _truncate, "first"),
        ("block", "truncated to its header", lambda scene, path: os.truncate(path, HEADER), "first"),
        ("block", "extended", _extend, "first"),
        ("block", "zeroed", _zero, "first"),
        ("block", "noise", _noise, "first"),
        ("block", "gone", lambda scene, path: path.unlink(), "first"),
        ("block", "in another bucket", _move_away, "first"),
        ("block", "another key's", _another_block, "first"),
        ("block", "a hard link to another", _hard_link, "first"),
        ("block", "another's payload", _another_payload, "first"),
        ("block", "another root's", _other_roots, "first"),
        ("block", "another namespace's", _forge(namespace=b"x" * 16), "first"),
        ("block", "another epoch's", _forge(epoch=7), "first"),
        ("block", "another group's", _forge(key=make_key(b"k" * 32, 1), group=1), "first"),
        ("block", "of an older format", _block_version(-1), "first"),
        ("block", "of a newer format", _block_version(1), "first"),
        ("block", "of others' mode", _mode(0o666), "none"),
        ("block", "of another owner", _owner, "none"),
        ("superblock", "truncated", lambda scene, path: os.truncate(path, scene.rng.randrange(1, PAGE)), "refused"),
        ("superblock", "truncated to one copy", lambda scene, path: os.truncate(path, PAGE), "none"),
        ("superblock", "extended", _extend, "none"),
        ("superblock", "zeroed", _zero, "refused"),
        ("superblock", "noise", _noise, "refused"),
        ("superblock", "another root's", _other_roots, "all"),
        ("superblock", "of an older format", _version(-1), "refused"),
        ("superblock", "of a newer format", _version(1), "refused"),
        ("epoch", "truncated", lambda scene, path: os.truncate(path, scene.rng.randrange(1, 128)), "refused"),
        ("epoch", "zeroed", _zero, "refused"),
        ("epoch", "noise", _noise, "refused"),
        ("epoch", "of another format", _epoch_version, "refused"),
        ("account", "truncated", _truncate, "none"),
        ("account", "noise", _noise, "none"),
        ("account", "gone", lambda scene, path: path.unlink(), "none"),
        ("bucket-00", "a file", _file, "bucket"),
        ("bucket-00", "a link", _link, "bucket"),
        ("bucket-00", "gone", lambda scene, path: shutil.rmtree(path), "bucket"),
        ("epochs", "a file", _file, "refused"),
        ("epochs", "a link", _link, "refused"),
        ("leases", "a link", _link, "refused"),
        ("leases/" + "0" * 16, "a pipe", _pipe, "none"),
        ("bucket-00/new-" + "0" * 16 + "-1", "a pipe", _pipe, "none"),
        (".", "a folder others may write into", _mode(0o777), "refused"),
        (".", "another user's folder", _owner, "refused"),
    )
    return cases + [Case("files", *row) for row in rows]


CASES = (*_slab_cases(), *_files_cases())


def wrong_file(budget: Budget) -> Tally:
    """Each case in a root as it was written; then the next, each time from another seed."""
    tally = Tally()
    roots = {layout: stored(layout, budget.folder / layout / "root", BLOCKS) for layout in LAYOUTS}
    others = {layout: stored(layout, budget.folder / layout / "other", BLOCKS) for layout in LAYOUTS}
    for number in range(budget.count):
        case = CASES[number % len(CASES)]
        if case.plant is _owner and os.geteuid() != 0:
            continue
        rng = random.Random(f"{number}/{budget.seed}")
        attack_with(tally, case, Scene(roots[case.layout], others[case.layout], budget.folder / "victim", rng))
        tally.iterations += 1
        tally.notes[f"{case.layout}: {case.missed}"] += 1
    return tally


def attack_with(tally: Tally, case: Case, scene: Scene) -> None:
    """One case, in a root that is as it was written, before and afterwards."""
    _remove(scene.victim)
    scene.victim.write_bytes(b"precious")
    _one(tally, case, scene)
    renew(scene.root)


def renew(root: Stored) -> None:
    """Make a root anew as it was written."""
    with suppress(FileNotFoundError):
        os.chown(root.root, os.geteuid(), -1)
    _remove(root.root)
    root.root.mkdir(mode=0o700)
    root.restore()


def _one(tally: Tally, case: Case, scene: Scene) -> None:
    path, where = scene.path(case.name), f"{case.layout}: {case.name}: {case.what}"
    case.plant(scene, path)
    victim, before = _contents(scene.victim), held()
    found = _found(scene.root)
    left = [now - was for now, was in zip(held(), before, strict=True)]
    tally.leaks += sum(max(0, more) for more in left)
    tally.expect(max(left) <= 0, f"{where}: {left} files and threads were left behind")
    tally.hangs += found.hung
    tally.wrong_bytes += len(found.wrong)
    tally.expect(not (found.hung or found.broken or found.wrong), f"{where}: {found}")
    tally.expect(_contents(scene.victim) == victim, f"{where}: what lies elsewhere was changed")
    if case.missed == "refused":
        tally.expect(bool(found.refused) and "\n" not in found.refused, f"{where}: was not refused")
    if case.missed in ("any", "refused"):
        return
    names = set(scene.root.names)
    missed = {"first": {scene.first}, "all": names, "none": set(), "bucket": _inside_bucket(scene.root, path)}[
        case.missed
    ]
    tally.wrong_bytes += len(found.loaded & missed)
    tally.expect(names - found.loaded == missed, f"{where}: missed {len(names - found.loaded)} of {BLOCKS}, {found}")


def _contents(path: Path) -> dict[str, bytes | None]:
    """A file, or a folder and what lies in it."""
    return {str(one): one.read_bytes() if one.is_file() else None for one in (path, *sorted(path.rglob("*")))}


def _inside_bucket(root: Stored, bucket: Path) -> set[OffloadKey]:
    return {key for key, (path, _) in root.places.items() if bucket in path.parents}


def _found(root: Stored) -> Found:
    """Open the root, load every block it may have, store another one and load that; close it."""
    found = Found()
    extra = make_key(b"one more block of thirty-two bytes", 0)

    async def work() -> None:
        async with opened(root.layout, root.root) as tier:
            known = await tier.known(root.names)
            await load(tier, known if root.layout == "slab" else root.names, found)
            (outcome,) = await tier.moved(JobKind.STORE, [extra])
            if outcome.ok:
                await load(tier, [extra], found)
                if extra not in found.loaded:
                    found.broken = "a block that was stored is not loaded"
                found.loaded.discard(extra)

    run(found, work)
    return found

"""What is put in the place of a file of a root: other bytes, another block, no file at all."""

from __future__ import annotations

import os
import random
import shutil
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import xxhash

from kvtier.tier.block_envelope import decode_slot_header, encode_slot_header
from kvtier.types.keys import OffloadKey

from .stored import HEADER, SLOT, Stored

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


def truncate(scene: Scene, path: Path) -> None:
    os.truncate(path, scene.rng.randrange(path.stat().st_size))


def extend(scene: Scene, path: Path) -> None:
    with path.open("ab") as file:
        file.write(scene.rng.randbytes(scene.rng.randrange(1, 20_000)))


def zero(scene: Scene, path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def noise(scene: Scene, path: Path) -> None:
    path.write_bytes(scene.rng.randbytes(path.stat().st_size))


def other_roots(scene: Scene, path: Path) -> None:
    shutil.copyfile(scene.same_of_other(path), path)


def remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)


def link(scene: Scene, path: Path) -> None:
    """What was there lies elsewhere now, and a link leads to it."""
    remove(scene.victim)
    path.rename(scene.victim)
    path.symlink_to(scene.victim)


def device(scene: Scene, path: Path) -> None:
    remove(path)
    path.symlink_to("/dev/zero")


def pipe(scene: Scene, path: Path) -> None:
    remove(path)
    os.mkfifo(path, 0o600)


def folder(scene: Scene, path: Path) -> None:
    remove(path)
    path.mkdir(mode=0o700)
    if scene.rng.random() < 0.5:
        (path / "precious").write_text("precious")


def socket_file(scene: Scene, path: Path) -> None:
    remove(path)
    with socket.socket(socket.AF_UNIX) as server, _inside(path.parent):
        server.bind(path.name)  # by its short name: the address of a socket takes a hundred characters


class _inside:  # a context manager, used as one
    def __init__(self, folder: Path) -> None:
        self._folder, self._was = folder, os.getcwd()

    def __enter__(self) -> None:
        os.chdir(self._folder)

    def __exit__(self, *_: object) -> None:
        os.chdir(self._was)


def plain_file(scene: Scene, path: Path) -> None:
    remove(path)
    path.write_bytes(b"precious")


def _seal(page: bytearray) -> bytes:
    page[8:24] = xxhash.xxh3_128_digest(bytes(page[24:]))
    return bytes(page)


def version(by: int, at: int = 0, size: int = PAGE) -> Plant:
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


def block_version(by: int) -> Plant:
    return lambda scene, path: version(by, scene.at)(scene, path)


def epoch_version(scene: Scene, path: Path) -> None:
    half = bytearray(path.read_bytes()[:128])
    half[VERSION_AT] ^= 1
    path.write_bytes(_seal(half) * 2)


def forge(**changes: object) -> Plant:
    """Fields of the first block's header changed under a checksum that holds."""

    def plant(scene: Scene, path: Path) -> None:
        page = memoryview(bytearray(path.read_bytes()[scene.at : scene.at + HEADER]))
        header = decode_slot_header(page)
        assert header is not None
        encode_slot_header(header._replace(**changes), page)
        poke(path, scene.at, bytes(page))

    return plant


def poke(path: Path, at: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


def another_block(scene: Scene, path: Path) -> None:
    """The whole of the second block in the place of the first."""
    second, at = scene.root.places[scene.root.names[1]]
    poke(path, scene.at, second.read_bytes()[at : at + SLOT])


def another_payload(scene: Scene, path: Path) -> None:
    second, at = scene.root.places[scene.root.names[1]]
    poke(path, scene.at + HEADER, second.read_bytes()[at + HEADER : at + SLOT])


def others_block(scene: Scene, path: Path) -> None:
    """The same block as another root has it."""
    theirs, at = scene.other.places[scene.first]
    poke(path, scene.at, theirs.read_bytes()[at : at + SLOT])


def hard_link(scene: Scene, path: Path) -> None:
    path.unlink()
    path.hardlink_to(scene.root.places[scene.root.names[1]][0])


def move_away(scene: Scene, path: Path) -> None:
    """The first block's file, in a bucket that is not its own."""
    elsewhere = next(one for one in sorted(scene.root.root.glob("bucket-*")) if one != scene.bucket)
    path.rename(elsewhere / path.name)


def mode(mode: int) -> Plant:
    return lambda scene, path: path.chmod(mode)


def owner(scene: Scene, path: Path) -> None:
    os.chown(path, 12_345, 12_345)

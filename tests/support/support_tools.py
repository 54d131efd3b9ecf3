"""Roots written by the real tiers, then handled behind their backs, for tests of the tools for stores on disk."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result
from support_files import FilesTier, account_is_true, open_files
from support_files import options as files_options
from support_fs import Tier, keys, layout, open_tier, options, slot_place
from support_shutdown import run_in_child

from faults.machine import warm
from kvtier.cli import main
from kvtier.tier.block_envelope import SlotHeader, decode_slot_header, encode_slot_header
from kvtier.types.jobs import LOADED, STORED, BlockOutcome
from kvtier.types.keys import OffloadKey
from kvtier.types.namespace import Namespace

HEADER = 4096
PAYLOAD = 16384
SLOT = HEADER + PAYLOAD


def tool(*arguments: str | Path) -> Result:
    """Run `kvtier` with these arguments."""
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def tool_json(*arguments: str | Path, status: int = 0) -> dict[str, Any]:
    """The JSON a tool prints, its exit status checked."""
    result = tool(*arguments, "--json")
    assert result.exit_code == status, result.output
    document: dict[str, Any] = json.loads(result.stdout)
    return document


def refusal(*arguments: str | Path) -> str:
    """The one line of a tool that could not do what it was asked to."""
    result = tool(*arguments)
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    return line


def found(document: dict[str, Any]) -> set[tuple[str, str, int]]:
    """Kind, reason and count of everything a check found."""
    return {(row["kind"], row["reason"], row["count"]) for row in document["counts"]}


def digest(tag: str = "", *page_bytes: int) -> str:
    """The namespace a tier of `write` stores into, in hex."""
    return Namespace(layout(*(page_bytes or (PAYLOAD,))), tag=tag).digest().hex()


@dataclass(frozen=True)
class Written:
    """A root and where its blocks lie: slab file and offset by key."""

    path: Path
    places: dict[OffloadKey, tuple[Path, int]]

    @property
    def files(self) -> dict[str, bytes]:
        """Everything in the folder."""
        return {path.name: path.read_bytes() for path in self.path.iterdir()}

    def peek(self, key: OffloadKey, at: int, length: int) -> bytes:
        """Bytes of a slot, its header page first."""
        path, offset = self.places[key]
        with path.open("rb") as file:
            file.seek(offset + at)
            return file.read(length)

    def poke(self, key: OffloadKey, at: int, data: bytes) -> None:
        """Overwrite bytes of a slot."""
        path, offset = self.places[key]
        overwrite(path, offset + at, data)

    def flip(self, key: OffloadKey, bit: int) -> None:
        """Flip one bit of a slot."""
        self.poke(key, bit // 8, bytes([self.peek(key, bit // 8, 1)[0] ^ 1 << bit % 8]))

    def forge(self, name: OffloadKey, **changes: object) -> None:
        """Change fields of a slot's header under a checksum that holds."""
        page = memoryview(bytearray(self.peek(name, 0, HEADER)))
        header: SlotHeader | None = decode_slot_header(page)
        assert header is not None
        encode_slot_header(header._replace(**changes), page)
        self.poke(name, 0, bytes(page))


def overwrite(path: Path, offset: int, data: bytes) -> None:
    """Write into a file, in place."""
    fd = os.open(path, os.O_RDWR)
    try:
        os.pwrite(fd, data, offset)
    finally:
        os.close(fd)


def write(path: Path, names: Sequence[OffloadKey] | None = None, tag: str = "") -> Written:
    """A root with these blocks (8 by default), closed in order."""
    names = keys(8) if names is None else names

    async def work() -> Written:
        async with open_tier(options(path), tag=tag) as tier:
            await tier.store_all(names)
            return Written(path, {key: slot_place(tier, key) for key in names})

    return asyncio.run(work())


def run_tier(path: Path, work: Any, tag: str = "") -> Any:
    """Open the root's tier, do something with it, close it."""

    async def opened() -> Any:
        async with open_tier(options(path), tag=tag) as tier:
            return await work(tier)

    return asyncio.run(opened())


def loadable(path: Path, tag: str = "") -> list[OffloadKey]:
    """The keys a tier that opens the root finds; each of them loads, byte for byte."""

    async def work(tier: Tier) -> list[OffloadKey]:
        names = list(tier.opened.recovered.keys)
        assert all(outcome.ok for outcome in await tier.load_all(names))
        return names

    names: list[OffloadKey] = run_tier(path, work, tag)
    return names


@dataclass(frozen=True)
class WrittenFiles:
    """A shared_fs root and the file of each of its blocks."""

    path: Path
    places: dict[OffloadKey, Path]

    @property
    def files(self) -> dict[str, bytes | None]:
        """Everything in the folder, and in the folders in it."""
        found = sorted(self.path.rglob("*"))
        return {str(path.relative_to(self.path)): None if path.is_dir() else path.read_bytes() for path in found}

    def flip(self, key: OffloadKey, bit: int) -> None:
        """Flip one bit of a block's file."""
        data = self.places[key].read_bytes()
        overwrite(self.places[key], bit // 8, bytes([data[bit // 8] ^ 1 << bit % 8]))

    def forge(self, name: OffloadKey, **changes: object) -> None:
        """Change fields of a block's header under a checksum that holds."""
        page = memoryview(bytearray(self.places[name].read_bytes()[:HEADER]))
        header: SlotHeader | None = decode_slot_header(page)
        assert header is not None
        encode_slot_header(header._replace(**changes), page)
        overwrite(self.places[name], 0, bytes(page))

    def bucket(self, key: OffloadKey) -> Path:
        """The bucket a block lies in."""
        return self.path / self.places[key].relative_to(self.path).parts[0]


def run_files(path: Path, work: Any, tag: str = "", **changes: object) -> Any:
    """Open a shared_fs tier, do something with it, close it."""

    async def opened() -> Any:
        async with open_files(files_options(path, **changes), tag=tag) as tier:
            return await work(tier)

    return asyncio.run(opened())


def write_files(
    path: Path, names: Sequence[OffloadKey] | None = None, tag: str = "", **changes: object
) -> WrittenFiles:
    """A shared_fs root with these blocks (8 by default), that nobody has open any more."""
    names = keys(8) if names is None else names

    async def work(tier: FilesTier) -> WrittenFiles:
        assert await tier.store(names) == [STORED] * len(names)
        return WrittenFiles(path, {key: tier.path(key) for key in names})

    written: WrittenFiles = run_files(path, work, tag, **changes)
    return written


def files_loadable(path: Path, names: Sequence[OffloadKey], tag: str = "") -> list[OffloadKey]:
    """Those of these keys that load, byte for byte; every account is true afterwards."""

    async def work(tier: FilesTier) -> list[OffloadKey]:
        outcomes: list[BlockOutcome] = await tier.load(names)
        assert account_is_true(tier) or not names
        return [key for key, outcome in zip(names, outcomes, strict=True) if outcome == LOADED]

    loaded: list[OffloadKey] = run_files(path, work, tag)
    return loaded


def tool_as_ordinary_user(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run `kvtier` without capabilities, so permissions count for root as well. A forked process does it: it has the
    imports already."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:

        def body() -> None:
            header = (ctypes.c_uint32 * 2)(0x20080522, 0)
            assert ctypes.CDLL(None, use_errno=True).capset(header, (ctypes.c_uint32 * 6)()) == 0
            result = tool(*arguments)
            os.pwrite(out.fileno(), result.stdout_bytes, 0)
            os.pwrite(err.fileno(), result.stderr_bytes or b"", 0)
            os._exit(result.exit_code)

        status = run_in_child(body)
        return subprocess.CompletedProcess([*arguments], status, out.read().decode(), err.read().decode())


_SHARER = """
import asyncio, sys
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from support_files import open_files, options
from support_fs import keys
async def main():
    async with open_files(options(Path(sys.argv[1]), capacity=int(sys.argv[3])), rows=32) as tier:
        await tier.store(keys(4, start=1000))
        print("open", flush=True)
        for line in sys.stdin:
            first = int(line)
            print(sum(outcome.ok for outcome in await tier.store(keys(32, start=first))), flush=True)
asyncio.run(main())
"""


@contextmanager
def shared_elsewhere(path: Path, capacity: int = 8 << 20) -> Iterator[subprocess.Popen[str]]:
    """A `files` root with 4 blocks more (from 1000 on) that another process has open.

    For each line with a number it stores 32 blocks from there on, and says how many are there then.
    """
    command = [sys.executable, "-c", _SHARER, str(path), os.path.dirname(__file__), str(capacity)]
    with warm.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as sharer:
        assert sharer.stdout is not None
        assert sharer.stdout.readline() == "open\n"
        yield sharer
    assert sharer.returncode == 0


_OWNER = """
import asyncio, sys
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from support_fs import keys, open_tier, options
async def main():
    async with open_tier(options(Path(sys.argv[1]))) as tier:
        await tier.store_all(keys(4))
        print("open", flush=True)
        sys.stdin.read()
asyncio.run(main())
"""


@contextmanager
def owned_elsewhere(path: Path) -> Iterator[int]:
    """A root with 4 blocks that another process has open; yields its process id."""
    command = [sys.executable, "-c", _OWNER, str(path), os.path.dirname(__file__)]
    with warm.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "open\n"
        yield owner.pid
    assert owner.returncode == 0

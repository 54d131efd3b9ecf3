"""A root of either layout with blocks that are known, and what a tier that opens it finds and loads."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import support_files
import support_fs
import xxhash

from kvtier.errors import KVTierError
from kvtier.testing.driver import content
from kvtier.tier.contract import LookupResult, TierContext
from kvtier.types.geometry import Geometry, KVLayout
from kvtier.types.jobs import BlockOutcome, JobKind
from kvtier.types.keys import OffloadKey, key_group
from kvtier.types.namespace import Namespace
from kvtier_fs import FSBackend, SharedFSBackend

LAYOUTS = ("slab", "files")
CAPACITY = {"slab": 2 << 20, "files": 8 << 20}
PAGE_BYTES = 10_000
"""Of one block; 2,288 bytes of padding follow it on the disk, and a header page of 4,096 bytes goes before it."""
HEADER = 4096
PAYLOAD = 12_288
SLOT = HEADER + PAYLOAD
DEADLINE_SECONDS = 20.0
_ROWS = 32


def base() -> Namespace:
    """The namespace everything is stored under."""
    return Namespace(support_fs.layout(PAGE_BYTES), model="m", weights="w", dtype="d", tag="t")


class _Content:
    """A block's bytes: a function of its namespace, key and generation, then zeros up to the alignment."""

    rows: Any
    geometry: Geometry
    namespace_number = 0

    def fill(self, row: int, key: OffloadKey, generation: int = 0) -> None:
        length, aligned = self._lengths(key)
        self.rows.view[row] = 0
        self.rows.view[row, :length] = content(key, self.namespace_number + generation, length)
        self.rows.digests[row] = xxhash.xxh3_128(self.rows.view[row, :aligned]).digest()

    def holds(self, row: int, key: OffloadKey, generation: int = 0) -> bool:
        length, aligned = self._lengths(key)
        whole = bool((self.rows.view[row, :length] == content(key, self.namespace_number + generation, length)).all())
        return whole and not self.rows.view[row, length:aligned].any()

    def _lengths(self, key: OffloadKey) -> tuple[int, int]:
        group = key_group(key)
        return self.geometry.kv_bytes_per_offloaded_block(group), self.geometry.aligned_bytes(group)


class SlabTier(_Content, support_fs.Tier):
    """An open slab tier."""

    async def known(self, names: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Those of these keys that were recovered."""
        return [key for key in names if key in self.directory]

    async def moved(self, kind: JobKind, names: Sequence[OffloadKey]) -> list[BlockOutcome]:
        """The outcomes of a load, or of a store in as many regions as it takes."""
        if kind is JobKind.LOAD:
            return support_fs.flat(await self.backend.load(self.load_job(names)))
        formats = []
        while sum(1 for _ in self.free_slots(0)) < len(names):
            formats.append(self.format_region(len(self.region_sizes), 0))
        return support_fs.flat(await self.backend.store(self.store_job(names, formats)))

    def generation_of(self, key: OffloadKey) -> int:
        return self.directory[key][1]


class FilesTier(_Content, support_files.FilesTier):
    """An open tier of type shared_fs; every block is of generation 0 as far as its content goes."""

    async def known(self, names: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Those of these keys that a lookup finds."""
        found = await self.backend.lookup(names)
        return [key for key, result in zip(names, found, strict=True) if result is LookupResult.HIT]

    async def moved(self, kind: JobKind, names: Sequence[OffloadKey]) -> list[BlockOutcome]:
        """The outcomes of a load or a store."""
        self.rows.view[: len(names)] = 0xEE
        if kind is JobKind.LOAD:
            return support_fs.flat(await self.backend.load(self.job(kind, names)))
        for row, key in enumerate(names):
            self.fill(row, key)
        return support_fs.flat(await self.backend.store(self.job(kind, names)))

    def generation_of(self, key: OffloadKey) -> int:
        return 0


Tier = SlabTier | FilesTier


@asynccontextmanager
async def opened(layout: str, root: Path, namespace: Namespace | None = None) -> AsyncIterator[Tier]:
    """An open tier, closed at the end."""
    namespace = namespace or base()
    geometry = Geometry(namespace.layout, support_fs.PAGE)
    rows = support_fs.TestRows(_ROWS, geometry.row_bytes)
    if layout == "slab":
        backend: Any = FSBackend(support_fs.options(root, capacity=CAPACITY[layout]))
    else:
        backend = SharedFSBackend(support_files.options(root, capacity=CAPACITY[layout], io_threads=2))
    try:
        opened = await backend.open(TierContext("fs", geometry, namespace, time.monotonic, rows=rows))
        tier = (SlabTier if layout == "slab" else FilesTier)(backend, opened, rows, geometry)
        tier.namespace_number = int.from_bytes(namespace.digest()[:3], "big") << 40
        yield tier
    finally:
        await backend.close()


async def store(tier: Tier, names: Sequence[OffloadKey]) -> None:
    """Store blocks; every one of them must be stored."""
    for start in range(0, len(names), _ROWS):
        outcomes = await tier.moved(JobKind.STORE, names[start : start + _ROWS])
        assert all(outcome.ok for outcome in outcomes), outcomes


@dataclass(slots=True)
class Found:
    """How opening a root ended. `refused`: the message of an error of ours; `broken`: of any other."""

    refused: str = ""
    broken: str = ""
    hung: bool = False
    known: set[OffloadKey] = field(default_factory=set)
    loaded: set[OffloadKey] = field(default_factory=set)
    wrong: set[OffloadKey] = field(default_factory=set)
    statuses: Counter[str] = field(default_factory=Counter)


async def load(tier: Tier, names: Sequence[OffloadKey], found: Found) -> None:
    """Load blocks; whatever counts as loaded is compared byte for byte."""
    for start in range(0, len(names), _ROWS):
        batch = names[start : start + _ROWS]
        for row, (key, outcome) in enumerate(zip(batch, await tier.moved(JobKind.LOAD, batch), strict=True)):
            found.statuses[str(outcome.status)] += 1
            if outcome.ok:
                right = tier.holds(row, key, tier.generation_of(key))
                (found.loaded if right else found.wrong).add(key)


def found_in(layout: str, root: Path, names: Sequence[OffloadKey], namespace: Namespace | None = None) -> Found:
    """Open a root, ask it for blocks, load those it knows of (in the `files` layout all of them), close it."""
    found = Found()

    async def work() -> None:
        async with opened(layout, root, namespace) as tier:
            known = await tier.known(names)
            found.known |= set(known)
            await load(tier, known if layout == "slab" else names, found)

    run(found, work)
    return found


def run(found: Found, work: Callable[[], Coroutine[Any, Any, None]], times: int = 1) -> None:
    """Run something that has so many seconds, and report how it ended."""

    async def limited() -> None:
        async with asyncio.timeout(DEADLINE_SECONDS * times):
            await work()

    try:
        asyncio.run(limited())
    except KVTierError as error:
        found.refused = str(error)
    except TimeoutError:
        found.hung = True
    except Exception as error:  # the boundary of an attack: whatever it is, it should not have been raised
        found.broken = f"{type(error).__name__}: {error}"


@dataclass(frozen=True, slots=True)
class Stored:
    """A root that was filled and closed: what it held then, and where its blocks lie (slab: file and offset)."""

    layout: str
    root: Path
    names: tuple[OffloadKey, ...]
    places: dict[OffloadKey, tuple[Path, int]]
    pristine: dict[str, bytes]
    folders: tuple[str, ...]

    def restore(self, *paths: str) -> None:
        """Write files as they were; all of them where none is named."""
        for name in self.folders:
            (self.root / name).mkdir(mode=0o700, exist_ok=True)
        for name in paths or self.pristine:
            path = self.root / name
            if not path.exists() or path.read_bytes() != self.pristine[name]:
                path.write_bytes(self.pristine[name])

    def name_of(self, path: Path) -> str:
        """A file's path within the root."""
        return str(path.relative_to(self.root))


def stored(layout: str, root: Path, count: int, namespace: Namespace | None = None) -> Stored:
    """A new root with some blocks, of the base namespace unless another is given."""
    root.parent.mkdir(parents=True, exist_ok=True)
    names = tuple(support_fs.keys(count))
    places: dict[OffloadKey, tuple[Path, int]] = {}

    async def work() -> None:
        async with opened(layout, root, namespace) as tier:
            await store(tier, names)
            for key in names:
                places[key] = support_fs.slot_place(tier, key) if layout == "slab" else (tier.path(key), 0)

    asyncio.run(work())
    files = {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}
    folders = tuple(str(path.relative_to(root)) for path in sorted(root.rglob("*")) if path.is_dir())
    return Stored(layout, root, names, places, files, folders)


def held() -> tuple[int, int]:
    """Open files and threads of this process."""
    return len(os.listdir("/proc/self/fd")), threading.active_count()


def page_layout(*page_bytes: int) -> KVLayout:
    """A layout with one group for each page size."""
    return support_fs.layout(*page_bytes)

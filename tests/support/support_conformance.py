"""A scenario over a real stack whose disk goes wrong, and file calls that fail one by one wherever they are made."""

from __future__ import annotations

import dataclasses
import fcntl
import os
import sys
import threading
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace

from support_paths import PROJECT
from support_stack import PLAIN, Engine, disk_tier, keys, load, parts_of, stack_file, store, whole

from kvtier.errors import KVTierError
from kvtier.stack import TierStack
from kvtier.tier.contract import LoadStore
from kvtier.types.jobs import BlockStatus
from kvtier_fs import FSBackend, FSOptions, SharedFSBackend, SharedFSOptions
from kvtier_fs.testing import FaultyIO

PRODUCT = (f"{PROJECT}/kvtier/", f"{PROJECT}/backends/")
MISSES = {BlockStatus.MISSING, BlockStatus.LATE}
TRANSFERS = ("pread", "pwrite")
FALLIBLE = (
    *("open", "unlink", "rename", "replace", "link", "truncate", "ftruncate", "listdir", "scandir", "mkdir"),
    *("rmdir", "chmod", "fchmod", "stat", "fstat", "access", "utime", "posix_fallocate", "flock"),
    *("preadv", "pwritev", "fdatasync", "fsync", "statvfs", "fstatvfs"),
    *TRANSFERS,
)


@dataclasses.dataclass(frozen=True)
class Size:
    """How big a scenario is: keys of each of its two sets, rows of the CPU tier, options of the fs tier by layout."""

    keys: int
    rows: int
    slab: dict[str, object]
    files: dict[str, object]


SMALL = Size(4, 2, {"capacity": "128KiB", "region_bytes": "24KiB"}, {"capacity": "200KiB"})
LARGE = Size(8, 4, {"capacity": "160KiB", "region_bytes": "36KiB"}, {"capacity": "240KiB"})


def tier_of(layout: str, options: FSOptions | SharedFSOptions, io: FaultyIO | None) -> LoadStore:
    """A filesystem tier of a layout on faulty I/O, or on its own."""
    if layout == "files":
        return SharedFSBackend(options, io.files() if io else None)
    return FSBackend(options, io.slab() if io else None)


@dataclasses.dataclass
class Scenario:
    """Open, store, evict, load, reset, close, reopen: each step correct or a miss, whatever the disk does."""

    root: Path
    layout: str
    size: Size = SMALL
    refused: list[KVTierError] = dataclasses.field(default_factory=list)
    loaded: int = 0
    evicted: bool = False

    def __post_init__(self) -> None:
        self.first, self.second = keys(self.size.keys), keys(self.size.keys, start=100)

    async def run(self, io: FaultyIO | None) -> None:
        """The whole scenario on one disk. A tier that refuses to open with a typed error ends it."""
        try:
            await self._session(io, self._first_life)
            await self._session(io, self._second_life)
        except KVTierError as error:
            self.refused.append(error)

    async def afterwards(self) -> None:
        """The disk is well again: the tier opens, loads what is there, stores and loads anew."""
        await self._session(None, self._after_life)

    async def _session(self, io: FaultyIO | None, life) -> None:
        engine = Engine(PLAIN, 2 * self.size.keys)
        config = stack_file(PLAIN, self.size.rows, disk_tier(self.layout, self.root, **getattr(self.size, self.layout)))
        parts = parts_of(config, engine, load_timeout_seconds=5.0, close_timeout_seconds=5.0)
        lower = tier_of(self.layout, parts.tiers[-1].options, io)
        stack = TierStack(dataclasses.replace(parts, tiers=[*parts.tiers[:-1], lower]))
        await stack.open()
        try:
            await life(stack, engine)
            stack.check_integrity()
        finally:
            await stack.close()
        stack.check_integrity()
        assert stack.close_report.unfinished_jobs == 0

    async def _first_life(self, stack: TierStack, engine: Engine) -> None:
        await self._store(stack, engine, self.first)
        await self._load(stack, engine, self.first)
        await self._store(stack, engine, self.second)
        held = await self._load(stack, engine, [*self.second, *self.first])
        self.evicted = held < 2 * self.size.keys

    async def _second_life(self, stack: TierStack, engine: Engine) -> None:
        await self._load(stack, engine, self.second)
        try:
            await stack.reset()
        except KVTierError as error:
            self.refused.append(error)
        held = await self._load(stack, engine, [*self.first, *self.second])
        assert not held, "a block from before the reset was loaded"
        await self._store(stack, engine, self.first[:2])
        await self._load(stack, engine, self.first[:2])

    async def _after_life(self, stack: TierStack, engine: Engine) -> None:
        stale = await self._load(stack, engine, self.second)
        assert not stale or self.refused, "a block from before the reset came back"
        new = keys(2, start=900)
        await self._store(stack, engine, new)
        await self._store(stack, engine, keys(self.size.rows, start=950))
        assert await self._load(stack, engine, new) == 2, "the tier serves as if nothing had happened"

    async def _store(self, stack: TierStack, engine: Engine, names) -> None:
        for start in range(0, len(names), self.size.rows):
            await store(stack, engine, whole(names[start : start + self.size.rows]))
            assert await stack.drain(10), "a store never ended"

    async def _load(self, stack: TierStack, engine: Engine, names) -> int:
        engine.wipe()
        result = await load(stack, engine, whole(names))  # compares every byte of what counts as loaded
        statuses = [outcome.status for group in result.outcomes for outcome in group]
        assert set(statuses) <= {BlockStatus.LOADED, *MISSES}, statuses
        self.loaded += statuses.count(BlockStatus.LOADED)
        return statuses.count(BlockStatus.LOADED)


Stack = tuple[str, ...]
"""The name of a file call, and the lines of the product that led to it."""


def stack_of(name: str) -> Stack:
    """The stack of the file call of this name that is being made."""
    lines, frame = [name], sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(PRODUCT):
            lines.append(f"{file}:{frame.f_lineno}")
        frame = frame.f_back
    return tuple(lines)


class FailingCalls:
    """Counts the file calls of a backend's modules, and their stacks.

    The N-th call, or the first one with a given stack, fails with an errno or moves half of its bytes.
    """

    def __init__(self, number: int = 0, errno: int = 0, stack: Stack | None = None) -> None:
        self.number, self.errno, self.stack = number, errno, stack
        self.stacks: Counter[Stack] = Counter()
        self.count = 0
        self.struck = ""
        self._lock = threading.Lock()

    @contextmanager
    def in_modules(self, package: str, *spared: str):
        """Put these calls in the place of `os` and `fcntl` in every module of a package but the spared ones."""
        patched = []
        proxies = {real.__name__: (real, self._failing(real)) for real in (os, fcntl)}
        try:
            for name, module in list(sys.modules.items()):
                if name in spared or not (name == package or name.startswith(f"{package}.")):
                    continue
                for called, (real, proxy) in proxies.items():
                    if getattr(module, called, None) is real:
                        setattr(module, called, proxy)
                        patched.append((module, called, real))
            yield self
        finally:
            for module, called, real in patched:
                setattr(module, called, real)

    def _failing(self, real: ModuleType) -> SimpleNamespace:
        """A module whose calls may fail."""
        proxy = SimpleNamespace(**{name: getattr(real, name) for name in dir(real) if not name.startswith("__")})
        for name in FALLIBLE if self.errno else TRANSFERS:
            if hasattr(real, name):
                setattr(proxy, name, self._wrap(name, getattr(real, name)))
        return proxy

    def _wrap(self, name: str, call):
        def wrapped(*args, **kwargs):
            stack = stack_of(name)
            with self._lock:
                self.count += 1
                self.stacks[stack] += 1
                strikes = self.count == self.number or (stack == self.stack and self.stacks[stack] == 1)
            if not strikes:
                return call(*args, **kwargs)
            self.struck = f"{name} (call {self.count})"
            if self.errno:
                raise OSError(self.errno, os.strerror(self.errno))
            if name == "pwrite":
                return call(args[0], bytes(args[1])[: len(args[1]) // 2], *args[2:])
            return call(*args, **kwargs)[: args[1] // 2]

        return wrapped

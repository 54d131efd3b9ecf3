"""One seed: two to four hosts with a stack each, in a random order of what happens to hosts and to their stores.

The contract of a namespace: each `reset` of a host is for the next weights, one that failed is repeated for the same,
and a host that opens has the newest that a reset has succeeded for. What a host stores after a failed reset is no
repetition of it: that may reach no store. Then no load returns bytes of other weights. What no host can know of is left
out: after a store came back from an earlier state that had forgotten a reset, or was forged to a number that was used
before, only what was stored before a host's own last reset must not come back (`is_blind`).
"""

from __future__ import annotations

import logging
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import numpy as np

from kvtier.errors import KVTierError
from kvtier.stack import assembly
from kvtier.stack.assembly import StackParts, StackSettings
from kvtier.stack.tier_stack import TierStack
from kvtier.testing.driver import TestRows
from kvtier.testing.memory import MemoryOptions
from kvtier.tier import shared_epoch
from kvtier.tier.checksum import checksum
from kvtier.tier.contract import LoadStore, Opened, SlotSpace, TierContext
from kvtier.types.geometry import GroupLayout, KVLayout, TensorRef
from kvtier.types.jobs import LOADED, STORED, JobResult, TransferJob
from kvtier.types.keys import CPU, GroupIndex, Medium, make_key
from kvtier.types.namespace import Namespace
from kvtier_remote.transport import Marker
from simulator.loop import VirtualLoop
from simulator.tiers import SimulatedCPUOptions, SimulatedGPU

from .stores import Disk, DiskTier, Folder, FolderTier, Server, ServerTier, text_of

PAGE_BYTES = 64
ROWS = 8
LAYOUT = KVLayout((GroupLayout((TensorRef(0, PAGE_BYTES),)),))


class OneNamespace(Namespace):
    """The namespace of every seed. Its digest is computed once: hosts are opened by the hundred thousand."""

    def manifest(self) -> str:
        return _MANIFEST

    def digest(self) -> bytes:
        return _DIGEST


_MANIFEST, _DIGEST = (made := Namespace(LAYOUT, model="simulated")).manifest(), made.digest()
NAMESPACE = OneNamespace(LAYOUT, model="simulated")
KEYS = [make_key(struct.pack("<Q", number), GroupIndex(0)) for number in range(5)]
FORGED = (1, 2, 1 << 20, (1 << 40) + 1, (1 << 53) + 1, (1 << 61) - 1, 1 << 61, 1 << 62, (1 << 63) - 1, 10**19 - 1)
_CONTENT = struct.Struct("<QQ")


class Cpu(LoadStore):
    """Rows in private memory, copied at once."""

    medium: ClassVar[Medium] = CPU
    Options: ClassVar[Any] = SimulatedCPUOptions

    def __init__(self, pages: Any) -> None:
        super().__init__(SimulatedCPUOptions(rows=ROWS, policy="lru"))
        self._pages = pages
        self.rows: TestRows

    async def open(self, context: TierContext) -> Opened:
        row_bytes = context.geometry.row_bytes
        self.rows = TestRows(ROWS, row_bytes)
        return Opened(ROWS * row_bytes, SlotSpace(ROWS * row_bytes, (1,), (row_bytes,)))

    async def store(self, job: TransferJob) -> JobResult:
        for group in job.gpu_groups:
            for row, page in zip(group.rows, group.runs.gpu_blocks.tolist(), strict=True):
                self.rows.view[row, :PAGE_BYTES] = self._pages[page]
                self.rows.set_checksum(row, checksum(self.rows.view[row, :PAGE_BYTES].data))
        return JobResult.uniform(job, STORED)

    async def load(self, job: TransferJob) -> JobResult:
        for group in job.gpu_groups:
            for row, page in zip(group.rows, group.runs.gpu_blocks.tolist(), strict=True):
                self._pages[page] = self.rows.view[row, :PAGE_BYTES]
        return JobResult.uniform(job, LOADED)

    async def close(self) -> None:
        """There is nothing to release."""


@dataclass(slots=True, eq=False)
class Host:
    """A host. `weights` are those it computes with, `reset_at` is the step of its last reset in this life, which not
    every store has taken if it `is_pending`."""

    number: int
    disk: Disk | None
    weights: int = 0
    reset_at: int = -1
    is_pending: bool = False
    stack: TierStack | None = None
    pages: Any = field(default_factory=lambda: np.zeros((len(KEYS), PAGE_BYTES), np.uint8))


@dataclass(frozen=True, slots=True)
class SeedOutcome:
    """What became of a seed."""

    seed: int
    violations: tuple[str, ...]
    trace: tuple[str, ...]
    covered: Counter[str]


class SeedRun:
    """The stores, the hosts and what happens to them."""

    def __init__(self, seed: int) -> None:
        self.rng = Random(f"kvtier epochs {seed}")
        rng = self.rng
        self.seed = seed
        self.servers = [Server() for _ in range(rng.choice((0, 1, 1, 1, 2)))]
        self.folder = Folder() if not self.servers or rng.random() < 0.3 else None
        self.hosts = [Host(i, Disk() if rng.random() < 0.6 else None) for i in range(rng.randint(2, 4))]
        self.newest = 0
        self.step = 0
        self.is_blind = False
        self.used = {0}
        self.dumps: list[tuple[Callable[[], None], list[int | None]]] = []
        self.violations: list[str] = []
        self.trace: list[str] = [f"{len(self.servers)} servers, folder: {self.folder is not None}"]
        self.covered: Counter[str] = Counter()

    def run(self) -> SeedOutcome:
        """All steps of the seed."""
        loop = VirtualLoop(Random(self.seed), seconds_max=1e6)
        with quiet(), self._seeded():
            loop.run(self._live())
            for error in loop.errors:
                self.violation(error)
            if loop.hang:
                self.violation(f"hang: {loop.hang}")
            loop.close()
        return SeedOutcome(self.seed, tuple(self.violations), tuple(self.trace), self.covered)

    @contextmanager
    def _seeded(self) -> Iterator[None]:
        rng = Random(f"numbers of {self.seed}")
        chosen = SimpleNamespace(randbits=rng.getrandbits, token_bytes=rng.randbytes)
        with mock.patch.object(shared_epoch, "secrets", chosen):
            yield

    async def _live(self) -> None:
        events = (self._open, self._store, self._load, self._reset, self._close, self._lose, self._restore,
                  self._forge, self._forget, self._down)  # fmt: skip
        weights = (5, 6, 8, 3, 2, 0.7, 0.6, 0.5, 0.6, 0.4)
        for step in range(self.rng.randint(15, 45)):
            self.step = step
            (event,) = self.rng.choices(events, weights)
            if self._is_down() and self.rng.random() < 0.3:
                event = self._up
            await event(self.rng.choice(self.hosts))
            self.used.update(number for number in self._numbers() if number is not None)
            if self.violations:
                break
        for host in self.hosts:
            await self._close(host)

    def note(self, text: str) -> None:
        """A line of the trace, with the epochs that the stores state."""
        stated = " ".join("-" if number is None else f"{number:x}" for number in self._numbers())
        self.trace.append(f"{self.step:3} {text} [{stated}]{' blind' if self.is_blind else ''}")
        self.covered[text.split(":")[0]] += 1

    def violation(self, text: str) -> None:
        self.trace.append(f"{self.step:3} VIOLATION: {text}")
        self.violations.append(text)

    def _numbers(self) -> list[int | None]:
        folder = [] if self.folder is None else [self.folder.epoch(NAMESPACE.digest())]
        return [server.epoch() for server in self.servers] + folder

    # -- hosts -----------------------------------------------------------------------------------------------------

    async def _open(self, host: Host) -> None:
        if host.stack is not None:
            return
        host.weights, host.reset_at, host.is_pending = self.newest, -1, False
        tiers: list[LoadStore] = [SimulatedGPU(SimulatedGPU.Options(type="gpu")), Cpu(host.pages)]
        if host.disk is not None:
            options = MemoryOptions(capacity=ROWS * 4096, slots_per_region=ROWS)
            tiers.append(DiskTier(options, host.disk))
        tiers += [ServerTier(server, i) for i, server in enumerate(self.servers)]
        tiers += [] if self.folder is None else [FolderTier(self.folder)]
        stack = TierStack(StackParts(tiers, NAMESPACE, [host.pages], settings=StackSettings(gather_seconds=0.0)))
        try:
            await stack.open()
        except KVTierError as error:
            self.note(f"open failed: host {host.number}: {error}")
            if not self._is_down():
                self.violation(f"host {host.number} does not open: {error}")
            return
        if host.disk is not None and host.disk.destroyed:
            self.violation(f"the disk of host {host.number} was made anew")
        host.stack = stack
        assert stack._assembled is not None
        self.used.add(stack._assembled.plane.control.epoch)
        self.note(f"open: host {host.number} weights {host.weights} epoch {stack._assembled.plane.control.epoch:x}")

    async def _close(self, host: Host) -> None:
        if host.stack is None:
            return
        await host.stack.close()
        host.stack = None
        self.note(f"close: host {host.number}")

    async def _store(self, host: Host) -> None:
        if host.stack is None:
            return
        chosen = self.rng.sample(range(len(KEYS)), 3)
        for page in chosen:
            host.pages[page, : _CONTENT.size] = np.frombuffer(_CONTENT.pack(host.weights, self.step), np.uint8)
        await host.stack.store([KEYS[i] for i in chosen], gpu_blocks=chosen)
        await host.stack.drain(1.0)
        self.note(f"store: host {host.number} {chosen}")

    async def _load(self, host: Host) -> None:
        if host.stack is None:
            return
        chosen = list(range(len(KEYS)))
        host.pages[:] = 0xEE
        await host.stack.lookup(KEYS)
        result = await host.stack.load(KEYS, gpu_blocks=chosen)
        loaded = [page for page, outcome in zip(chosen, result.outcomes[0], strict=True) if outcome.ok]
        self.note(f"load: host {host.number} {len(loaded)}")
        for page in loaded:
            weights, stored_at = _CONTENT.unpack(host.pages[page, : _CONTENT.size].tobytes())
            self._judge(host, weights, stored_at)

    def _judge(self, host: Host, weights: int, stored_at: int) -> None:
        self.covered["blocks loaded"] += 1
        own = weights < host.weights and stored_at < host.reset_at
        if own or (weights != host.weights and not self.is_blind):
            kind = "from before its reset" if own else "of other weights"
            self.violation(f"host {host.number} (weights {host.weights}) found weights {weights} {kind}")

    async def _reset(self, host: Host) -> None:
        if host.stack is None:
            return
        host.weights += not host.is_pending
        host.reset_at = self.step
        try:
            await host.stack.reset()
        except KVTierError as error:
            self.note(f"reset failed: host {host.number}: {error}")
            host.is_pending = True
            if not self._is_down():
                self.violation(f"host {host.number} cannot reset: {error}")
            return
        host.is_pending = False
        self.newest = max(self.newest, host.weights)
        self.note(f"reset: host {host.number} to weights {host.weights}")

    def _is_down(self) -> bool:
        return any(server.down for server in self.servers)

    # -- stores ----------------------------------------------------------------------------------------------------

    def _stores(self) -> list[Server | Folder]:
        return [*self.servers, *([] if self.folder is None else [self.folder])]

    async def _lose(self, host: Host) -> None:
        """A marker is evicted or removed, or the store is emptied."""
        store, empty = self.rng.choice(self._stores()), self.rng.random() < 0.3
        if isinstance(store, Server):
            store.markers.clear()
            if empty:
                store.values.clear()
        else:
            store.files.clear()
        self.note(f"lost{' with all blocks' if empty else ''}")

    async def _restore(self, host: Host) -> None:
        """Keep a copy of all stores, or go back to one."""
        if not self.dumps or self.rng.random() < 0.5:
            dumps = [store.dump() for store in self._stores()]
            self.dumps.append((lambda: [dump() for dump in dumps] and None, self._numbers()))
            self.note("dump kept")
            return
        restore, numbers = self.rng.choice(self.dumps)
        before = self._numbers()
        restore()
        self.is_blind = self.is_blind or numbers != before
        self.note("dump restored")

    async def _forge(self, host: Host) -> None:
        """A marker is damaged, or written by somebody else."""
        server = self.rng.choice(self.servers) if self.servers else None
        if server is None or not server.markers:
            return
        name, held = next(iter(server.markers.items()))
        incarnation = bytes.fromhex(held[:16].decode()) if self.rng.random() < 0.5 else self.rng.randbytes(8)
        number = self.rng.choice((*FORGED, (server.epoch() or 0) + 1))
        server.markers[name] = text_of(Marker(incarnation, number))
        self.is_blind = self.is_blind or number in self.used or number < max(self.used)
        self.note(f"forged: {number:x}")

    async def _forget(self, host: Host) -> None:
        """More namespaces than the table of a disk lists."""
        if host.disk is not None and host.stack is None:
            host.disk.forget(self.rng)
            self.note(f"forgotten: host {host.number}")

    async def _down(self, host: Host) -> None:
        """A server does not answer for a while."""
        if self.servers:
            self.rng.choice(self.servers).down = True
            self.note("down")

    async def _up(self, host: Host) -> None:
        for server in self.servers:
            server.down = False
        self.note("up")


@contextmanager
def quiet() -> Iterator[None]:
    """No log, and nothing that policies learned is kept, while seeds run."""
    log = logging.getLogger("kvtier")
    level = log.level
    log.setLevel(logging.CRITICAL + 1)
    try:
        with mock.patch.object(assembly, "model_files", return_value=None):
            yield
    finally:
        log.setLevel(level)


def run_seed(seed: int) -> SeedOutcome:
    """Run one seed."""
    return SeedRun(seed).run()


def run_range(first: int, last: int) -> tuple[list[SeedOutcome], Counter[str]]:
    """Run seeds. Returns the broken ones, and what all went through."""
    broken, covered = list[SeedOutcome](), Counter[str]()
    for seed in range(first, last):
        outcome = run_seed(seed)
        covered.update(outcome.covered)
        if outcome.violations:
            broken.append(outcome)
    return broken, covered

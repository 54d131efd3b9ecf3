"""A victim on tier `shared_fs`: placement and eviction are the backend's own; the folder shows what is there."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from contextlib import suppress

from kvtier.aio.daemon_pool import DaemonPool
from kvtier.errors import ResourceError
from kvtier.tier.contract import LookupResult
from kvtier.types.jobs import JobKind
from kvtier_fs import SharedFSBackend
from kvtier_fs.io.contract import IOEngine
from kvtier_fs.io.threads import ThreadsEngine
from kvtier_fs.io.uring import UringEngine
from kvtier_fs.shared.root import FilesHooks

from .life import JUNK, Life
from .oracle import base_of, first_word, whole
from .shared_log import EventKind, Word
from .world import era_of, tag_of

_LOADS_AT_ONCE = 24
_STRANGERS = 4
_COMPANION = 1 << 32


class FilesLife(Life):
    """Opens SharedFSBackend through its LoadStore interface, with an engine that notes what it does.

    A block's tag counts the stores of the world: the generations on the disk are times, which no oracle foresees.
    """

    backend: SharedFSBackend

    async def open(self) -> None:
        self.backend = SharedFSBackend(self.world.options, FilesHooks(engine=self._engine))
        opened = await self.backend.open(self.context())
        self.opened(opened.epoch)
        await self.backend.sweep()
        self.log.words[Word.SWEPT] = 1
        self.present: set[int] = set()
        self._own: dict[int, tuple[int, int]] = {}
        self._serial = len(self.world.stored) + (_COMPANION if self.plan.companion else 0)
        self._evicted = 0

    def _engine(self) -> IOEngine:
        options, loop = self.world.options, asyncio.get_running_loop()
        if self.world.engine == "io_uring":
            ring = UringEngine(loop, options.io_depth)
            with suppress(ResourceError):  # refused meanwhile: threads serve, as in production
                ring.open()
                return self.noted(ring, _inode)
        threads = DaemonPool("victim-io", options.io_threads)
        engine = ThreadsEngine(loop, threads, options.io_threads)
        engine.open()
        return self.noted(engine, _inode)

    async def load_all(self) -> None:
        files = {name for _, _, names in os.walk(self.world.roots[0]) for name in names}
        there = [number for number, name in enumerate(self.world.file_names) if name in files]
        strangers = self.rng.sample(range(len(self.world.keys)), _STRANGERS)
        asked = list(dict.fromkeys(there + strangers))
        answers = await self.backend.lookup([self.world.keys[number] for number in asked])
        hits = [number for number, answer in zip(asked, answers, strict=True) if answer is LookupResult.HIT]
        blocks = [(number, row, -1, 0) for row, number in enumerate(hits[: self.log.shape.load_rows])]
        chunks = [blocks[at : at + _LOADS_AT_ONCE] for at in range(0, len(blocks), _LOADS_AT_ONCE)]
        await asyncio.gather(*(self._load_found(chunk) for chunk in chunks))

    async def _load_found(self, blocks: Sequence[tuple[int, int, int, int]]) -> None:
        job = self.job(JobKind.LOAD, blocks)
        outcomes = self.outcomes(job, await self.backend.load(job))
        for number, row, _, _ in blocks:
            outcome = outcomes[self.world.keys[number]]
            self.log.load(number, tag_of(self.era, 0), row, outcome.status)
            if outcome.ok:
                self.present.add(number)

    async def batch(self, rows: Sequence[int]) -> None:
        world, log = self.world, self.log
        choice = world.numbers_of(self.pick_group())
        wanted = [number for number in self.rng.sample(choice, min(2 * len(rows), len(choice)))
                  if number not in self.present][: len(rows)]  # fmt: skip
        if not wanted:
            self.present.clear()  # all of them were stored at some time; many are evicted by now
            return
        blocks = []
        for number, row in zip(wanted, rows, strict=False):
            self._serial += 1
            tag = tag_of(self.era, self._serial)
            self.fill(row, number, tag)
            self._own[base_of(world.keys[number], tag)] = number, tag
            log.event(EventKind.STORE, number, tag)
            blocks.append((number, row, -1, 0))
            self.present.add(number)
        job = self.job(JobKind.STORE, blocks)
        outcomes = self.outcomes(job, await self.backend.store(job))
        self._count_evictions()
        stored = sum(outcome.ok for outcome in outcomes.values())
        log.add(Word.STORED, stored)
        log.add(Word.REFUSED, len(blocks) - stored)

    def _count_evictions(self) -> None:
        evicted = self.backend.counters["evicted"]
        self.log.add(Word.EVICTED, evicted - self._evicted)
        self._evicted = evicted

    async def load_some(self, rows: Sequence[int]) -> None:
        numbers = self.rng.sample(sorted(self.present), min(len(rows), len(self.present)))
        blocks = [(number, row, -1, 0) for number, row in zip(numbers, rows, strict=False)]
        if not blocks:
            return
        for _, row, _, _ in blocks:
            self.log.rows.view[row] = JUNK
        era = self.era
        job = self.job(JobKind.LOAD, blocks)
        outcomes = self.outcomes(job, await self.backend.load(job))
        for number, row, _, _ in blocks:
            if outcomes[self.world.keys[number]].ok:
                self._check(row, number, era)
            else:
                self.log.add(Word.MISSED)
                self.present.discard(number)

    def _check(self, row: int, number: int, era: int) -> None:
        """The bytes name a store; it must be one of this key and of this era, as far as this process knows them."""
        found = self.log.rows.view[row, : self.world.block_bytes(number)]
        base = first_word(found)
        stored = self._own.get(base) or self.world.stored.get(base)
        if stored is None and whole(found):
            self.log.event(EventKind.MET, number, tag_of(era, 0), base)
        elif stored is None or stored[0] != number or era_of(stored[1]) != era:
            self.log.add(Word.WRONG)
            self.log.say(f"a row for key number {number} in era {era} holds the bytes of {stored}")
        else:
            self.check_row(row, number, stored[1])

    async def reset(self, epoch: int) -> None:
        self.present.clear()
        await self.backend.reset(epoch)

    async def close(self) -> None:
        await self.backend.close()


def _inode(fd: int) -> int:
    return os.fstat(fd).st_ino

"""A victim on layout `slab`: the production control plane's tier decides on slots, evictions and formats of regions."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from kvtier.control.tiers.owned_tier import OwnedTier
from kvtier.tier.contract import Opened
from kvtier.types.jobs import BlockStatus, JobKind, TransferJob
from kvtier_fs import FSBackend
from kvtier_fs.local.opening import Hooks
from kvtier_fs.local.root import Root
from kvtier_fs.roots.disk import make_engine

from .life import JUNK, Life, Noted
from .shared_log import EventKind, Word
from .world import tag_of

FILE_SHIFT = 32
_LOADS_AT_ONCE = 48


class SlabLife(Life):
    """Opens FSBackend through its LoadStore interface, as the stack does."""

    backend: FSBackend
    tier: OwnedTier

    async def open(self) -> None:
        self.backend = FSBackend(self.world.options, Hooks(engine=self._engine))
        opened = await self.backend.open(self.context())
        self._take_over(opened)

    def _engine(self, root: Root) -> Noted:
        number = self.world.options.roots.index(root.path)
        names = {}

        def file_of(fd: int) -> int:
            if fd not in names:
                names.update({own: number << FILE_SHIFT | file for file, own in root.fds.items()})
            return names[fd]

        engine = make_engine(self.world.engine, root.pools.io, self.world.options, root.hold_engine)
        return self.noted(engine, file_of)

    def _take_over(self, opened: Opened) -> None:
        assert opened.space is not None
        self.opened(opened.epoch)
        self.log.words[Word.FROM_SNAPSHOT] = self.backend.counters["open.snapshot"]
        self.tier = OwnedTier("fs", opened.space, "lru")
        self.tier.restore(opened.recovered)
        self.tier.take_changes()
        self.found = opened.recovered

    async def load_all(self) -> None:
        found = self.found
        slots, generations = found.slots.tolist(), found.generations.tolist()
        blocks = []
        for row, (key, slot, generation) in enumerate(zip(found.keys, slots, generations, strict=True)):
            number = self.world.numbers.get(bytes(key), -1)
            if number < 0 or row >= self.log.shape.load_rows:
                self.log.add(Word.WRONG)
                self.log.say(f"recovered a key that was not stored, or too many: {bytes(key).hex()}")
                continue
            blocks.append((number, row, slot, generation))
        chunks = [blocks[at : at + _LOADS_AT_ONCE] for at in range(0, len(blocks), _LOADS_AT_ONCE)]
        await asyncio.gather(*(self._load_found(chunk) for chunk in chunks))

    async def _load_found(self, blocks: Sequence[tuple[int, int, int, int]]) -> None:
        job = self.job(JobKind.LOAD, blocks)
        outcomes = self.outcomes(job, await self.backend.load(job))
        for number, row, slot, generation in blocks:
            outcome = outcomes[self.world.keys[number]]
            self.log.load(number, tag_of(self.era, generation), row, outcome.status)
            if outcome.status is BlockStatus.CORRUPT:
                self.tier.discard(slot, generation)

    def _note_evictions(self) -> None:
        for removed, keys in self.tier.take_changes():
            if removed:
                for key in keys:
                    self.log.event(EventKind.EVICTED, self.world.numbers[bytes(key)])

    async def batch(self, rows: Sequence[int]) -> None:
        tier, world, log = self.tier, self.world, self.log
        choice = world.numbers_of(self.pick_group())
        wanted = [number for number in self.rng.sample(choice, min(2 * len(rows), len(choice)))
                  if world.keys[number] not in tier.directory][: len(rows)]  # fmt: skip
        before = tier.evictions
        slots = tier.reserve([world.keys[number] for number in wanted])
        log.add(Word.EVICTED, tier.evictions - before)
        self._note_evictions()
        if not slots:
            return
        era, blocks = self.era, []
        for number, row, slot in zip(wanted, rows, slots, strict=False):
            generation = tier.table.generation[slot]
            tag = tag_of(era, generation)
            self.fill(row, number, tag)
            log.event(EventKind.STORE, number, tag, slot)
            blocks.append((number, row, slot, generation))
        await self._store(blocks, era)

    async def _store(self, blocks: Sequence[tuple[int, int, int, int]], era: int) -> None:
        tier, log = self.tier, self.log
        formats = tier.placement.formats_for([slot for _, _, slot, _ in blocks])
        plain = self.job(JobKind.STORE, blocks)
        job = TransferJob(plain.job_id, plain.kind, plain.groups, None, plain.epoch, formats)
        log.add(Word.REFORMATTED, sum(each.generation > 1 for each in formats))
        outcomes = self.outcomes(job, await self.backend.store(job))
        good = [block for block in blocks if outcomes[self.world.keys[block[0]]].ok]
        tier.commit([slot for _, _, slot, _ in good])
        tier.abort([slot for number, _, slot, _ in blocks if not outcomes[self.world.keys[number]].ok])
        log.add(Word.STORED, len(good))
        log.add(Word.REFUSED, len(blocks) - len(good))
        for number, _, slot, generation in good:
            log.event(EventKind.STORED, number, tag_of(era, generation), slot)
        if good:
            tier.placement.complete_formats(formats)
        self._note_evictions()

    async def load_some(self, rows: Sequence[int]) -> None:
        tier, era = self.tier, self.era
        ready = [key for key in tier.directory if tier.ready(key) is not None]
        keys = self.rng.sample(ready, min(len(rows), len(ready)))
        blocks = []
        for key, row in zip(keys, rows, strict=False):
            slot = tier.directory[key]
            self.log.rows.view[row] = JUNK
            blocks.append((self.world.numbers[bytes(key)], row, slot, tier.table.generation[slot]))
        slots = [slot for _, _, slot, _ in blocks]
        tier.pin(slots)
        job = self.job(JobKind.LOAD, blocks)
        outcomes = self.outcomes(job, await self.backend.load(job))
        for number, row, slot, generation in blocks:
            outcome = outcomes[self.world.keys[number]]
            if outcome.ok:
                self.check_row(row, number, tag_of(era, generation))
            else:
                self.log.add(Word.MISSED)
                tier.discard(slot, generation)
        tier.unpin(slots)
        self._note_evictions()

    async def reset(self, epoch: int) -> None:
        self.tier.reset()
        self.tier.take_changes()
        await self.backend.reset(epoch)

    async def close(self) -> None:
        await self.backend.close()

"""Steps of one block of a job: those of a store and of a load, each ending in an outcome.

A block whose job no longer waits for it (late, cancelled) is abandoned: it ends between two steps and removes its
temporary. Once I/O may use its row, the job waits for its end. Steps are cancelled only where they have made and opened
nothing yet: while they wait for the epoch.
"""

import asyncio
import errno
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial

from kvtier.tier.block_envelope import Mismatch, encode_slot_header
from kvtier.tier.job_run import JobRun, error_outcome
from kvtier.types.jobs import (
    CORRUPT,
    LOADED,
    MISSING,
    PRESENT,
    STORED,
    BlockOutcome,
    DropReason,
    JobKind,
    dropped,
    failed,
)
from kvtier_fs.io.contract import IOKind
from kvtier_fs.shared.block_file import (
    ExpectedBlock,
    MismatchedFile,
    OpenBlock,
    OwnedFile,
    Published,
    Temporary,
    check_block,
    give_name,
    open_block,
    publish,
)
from kvtier_fs.shared.bucket import Bucket
from kvtier_fs.shared.folder import GONE, LockBusy
from kvtier_fs.shared.root import SharedRoot, TransferLimit

_FULL = dropped(DropReason.DISK_FULL)


@dataclass(slots=True, eq=False)
class Block:
    """A block of a job. `touching`: I/O may use its row. `abandoned`: its job has an outcome for it already.

    Its steps release `file`, which they have open, or have made, or are about to, and `page`, the number of the header
    page it holds (-1: none), whatever is raised.
    """

    run: JobRun
    group: int
    position: int
    row: int
    payload: memoryview
    wanted: ExpectedBlock
    touching: bool = field(default=False)
    abandoned: bool = field(default=False)
    file: OwnedFile | None = field(default=None)
    page: int = field(default=-1)

    def end(self, outcome: BlockOutcome) -> None:
        """Report its outcome. The first one counts."""
        self.touching = False
        self.run.end(self.group, self.position, outcome, len(self.payload) if outcome.ok else 0)

    def give_up(self, outcome: BlockOutcome) -> None:
        """Stop waiting for it, unless I/O may touch its row."""
        if not self.touching:
            self.abandoned = True
            self.end(outcome)


class BlockSteps:
    """Moves blocks between rows and files of one root."""

    def __init__(self, root: SharedRoot, set_checksum: Callable[[int, bytes], None]) -> None:
        self._root = root
        self._set_checksum = set_checksum
        self._counters: Counter[str] = root.counters

    async def run(self, block: Block, current: asyncio.Future[int | None]) -> None:
        """Run all steps of a block, which ends with an outcome. `current`: the epoch that the root states now."""
        async with self._gate(block).permits:
            if block.abandoned:
                return
            try:
                outcome = await self._move(block, current)
            except asyncio.CancelledError:
                raise  # the loop ends: a disk that hangs must not keep it, and I/O may still use the file and the page
            except BaseException:
                await self._release(block)
                raise
            await self._release(block)
            block.end(outcome)

    def _gate(self, block: Block) -> TransferLimit:
        return self._root.stores if block.run.kind is JobKind.STORE else self._root.loads

    async def _move(self, block: Block, current: asyncio.Future[int | None]) -> BlockOutcome:
        storing = block.run.kind is JobKind.STORE
        try:
            epoch = await asyncio.shield(current)
            if epoch != block.wanted.header.epoch:
                self._counters["epoch.outdated"] += 1
                return dropped(DropReason.RESET) if storing else MISSING
            return await (self._store(block) if storing else self._load(block))
        except OSError as error:
            return self._failure(error, storing)

    async def _release(self, block: Block) -> None:
        """Release a block's page and its file, which is removed unless it became the block. May be called again."""
        root, file = self._root, block.file
        if block.page >= 0:
            self._gate(block).pages.release(block.page)
            block.page = -1
        if file is not None and file.fd >= 0:
            await root.call(file.close)
        if isinstance(file, Temporary) and file.there:
            await root.discard(root.buckets[block.wanted.place.bucket], file)

    def _failure(self, error: OSError, storing: bool) -> BlockOutcome:
        number = error.errno or errno.EIO
        if number in GONE and not storing:
            return MISSING
        self._counters[f"errno.{errno.errorcode.get(number, number)}"] += 1
        return error_outcome(number)

    # -- storing -------------------------------------------------------------------------------------------------

    async def _store(self, block: Block) -> BlockOutcome:
        """Store a block; where the disk is full, evict and try once more."""
        outcome = await self._try(block)
        if outcome != _FULL or block.abandoned:
            return outcome
        wanted = block.wanted
        await self._release(block)
        if await self._root.make_room(wanted.place.bucket, wanted.file_bytes):
            self._counters["full.retried"] += 1
            outcome = await self._try(block)
            self._root.on_room_made(outcome != _FULL)
        return outcome

    async def _try(self, block: Block) -> BlockOutcome:
        root, wanted = self._root, block.wanted
        bucket, block.file = root.buckets[wanted.place.bucket], Temporary(root.temporary())
        try:
            reserved = await root.with_bucket(bucket, partial(bucket.reserve, wanted, block.file))
            if isinstance(reserved, LockBusy):
                return dropped(DropReason.BACKLOG)
            if not isinstance(reserved, Temporary):
                return reserved
            if block.abandoned:
                return dropped(DropReason.BACKLOG)
            number = await self._write(block, reserved)
            if number or block.abandoned:  # abandoned by close: its row may have changed while it was written
                return error_outcome(number) if number else dropped(DropReason.CLOSING)
            return await self._publish(bucket, wanted, reserved)
        except OSError as error:
            return self._failure(error, True)

    async def _write(self, block: Block, reserved: Temporary) -> int:
        with self._page(block) as page:
            encode_slot_header(block.wanted.header, page)
            return await self._root.io.move_file(IOKind.WRITE, reserved.fd, [page, block.payload], len(page))

    @contextmanager
    def _page(self, block: Block) -> Iterator[memoryview]:
        """A header page for the I/O of a block, which may use the block's row until this ends."""
        pages = self._gate(block).pages
        block.page = pages.acquire()
        block.touching = True
        try:
            yield pages.pages[block.page]
        finally:
            block.touching = False

    async def _publish(self, bucket: Bucket, wanted: ExpectedBlock, written: Temporary) -> BlockOutcome:
        """Make a complete temporary the block. It is always closed. Raises OSError."""
        root = self._root
        published = await root.call(publish, root.folder, wanted, written, root.hooks.wall())
        if published is Published.GROWN:
            charged = await root.with_bucket(bucket, bucket.charge_grown)
            if charged is not True:
                return dropped(DropReason.BACKLOG if isinstance(charged, LockBusy) else DropReason.NO_SLOT)
            published = await root.call(give_name, root.folder, wanted, written)
        if published is Published.REPLACED:
            with suppress(OSError):
                await root.with_bucket(bucket, bucket.sweep)
        return PRESENT if published is Published.EXISTED else STORED

    # -- loading -------------------------------------------------------------------------------------------------

    async def _load(self, block: Block) -> BlockOutcome:
        root = self._root
        block.file = OpenBlock()
        there = await root.call(open_block, root.folder, block.wanted, root.probe.direct, block.file)
        if isinstance(there, MismatchedFile) and there.is_other_version:
            return MISSING
        if isinstance(there, MismatchedFile):
            self._counters["mismatch.file"] += 1
            await self._remove(block.wanted, there)
            return CORRUPT
        return MISSING if there is None or block.abandoned else await self._read(block, there)

    async def _read(self, block: Block, there: OpenBlock) -> BlockOutcome:
        with self._page(block) as page:
            error = await self._root.io.move_file(IOKind.READ, there.fd, [page, block.payload], len(page))
            if error:
                return MISSING if error in GONE else failed(error)
            checked = await self._root.call(check_block, page, block.payload, block.wanted)
            if not isinstance(checked.found, Mismatch) and not block.abandoned:
                self._set_checksum(block.row, checked.found)
        if checked.found is Mismatch.OTHER_VERSION:
            return MISSING
        if isinstance(checked.found, Mismatch):
            self._counters[f"mismatch.{checked.found}"] += 1
            corrupt = checked.found not in (Mismatch.EPOCH, Mismatch.GENERATION)
            if checked.found is not Mismatch.EPOCH or checked.epoch < block.wanted.header.epoch:
                await self._remove(block.wanted, MismatchedFile(there.inode, checked.front))
            return CORRUPT if corrupt else MISSING
        await self._touch(there)
        return LOADED

    async def _touch(self, there: OpenBlock) -> None:
        now = self._root.rules.touch_at(there.touched)
        if now is not None:
            self._root.rules.note("touched")
            with suppress(OSError):
                await self._root.call(os.utime, there.fd, (now, now))

    async def _remove(self, wanted: ExpectedBlock, wrong: MismatchedFile) -> None:
        """Remove a wrong file if the lock of its bucket is free; otherwise the next load that finds it removes it."""
        bucket = self._root.buckets[wanted.place.bucket]
        with suppress(OSError):
            removed = await self._root.with_bucket(bucket, partial(bucket.remove, wanted, wrong))
            self._counters["removed" if removed is True else "not_removed"] += 1

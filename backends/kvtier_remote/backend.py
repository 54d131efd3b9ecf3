"""The tier over any transport: makes names and values, verifies what comes back, and says what became of each block."""

from __future__ import annotations

import asyncio
import errno
import logging
import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import ClassVar

from kvtier.aio.shielded_wait import shielded_wait
from kvtier.errors import ConfigError, ResourceError, UsageError
from kvtier.tier.block_age import age_limit, next_generation
from kvtier.tier.block_envelope import Mismatch
from kvtier.tier.contract import LoadStore, LookupResult, Opened, Rows, TierContext
from kvtier.tier.job_run import JobRun, check_job
from kvtier.tier.shared_epoch import INCARNATION_BYTES, Marker, SharedEpoch
from kvtier.types.jobs import (
    CANCELLED,
    CORRUPT,
    LATE,
    LOADED,
    MISSING,
    BlockOutcome,
    BlockStatus,
    DropReason,
    JobKind,
    JobResult,
    TransferJob,
    dropped,
    failed,
)
from kvtier.types.keys import REMOTE, Medium, OffloadKey, key_group
from kvtier_remote.attempts import Attempts, HedgedGets, Refusal
from kvtier_remote.background import EvictionWatch, LeaseKeeper
from kvtier_remote.call_limit import CallLimit
from kvtier_remote.names import BlockNames
from kvtier_remote.options import RemoteOptions
from kvtier_remote.transport import ReportsLateness, Sharded, StoresManifest, Transport, Value, ValueRef
from kvtier_remote.value import KEY_BYTES_MAX, Headers, RemoteBlock, header_bytes, value_bytes_max
from kvtier_remote.write_budget import ServerBudget

_log = logging.getLogger("kvtier.remote")
_RESULTS = {True: LookupResult.HIT, False: LookupResult.MISS, None: LookupResult.RETRY}


class RemoteBackend(LoadStore):
    """A tier on a server that other processes and hosts use too. Shared: the server places and evicts, and a block may
    vanish at any moment.

    A stored block is STORED, dropped (disk_full: the server has no room; write_budget: this process has written what it
    may; reset: the namespace has a newer epoch here; key_too_long; closing), LATE or failed with an errno. A loaded
    block is LOADED once its whole header and its payload's checksum were verified in its row, and MISSING if there is
    none of the current epoch. If anything else differs it is CORRUPT and removed from the server.

    A job's rows are in use until its call returns, and never after: cancelled or late, it returns once the requests
    that have begun have ended, each within `request_timeout_seconds`.

    `counters` counts what happened by place and reason: `mismatch.<field>` for loads refused by verification
    (`payload_bytes`: of another length; `generation`: older than `max_age`), `errno.<name>` for failed requests,
    `reset.failed` (the server did not take an epoch), `lease.failed`, `lookup.failed`, `close.stuck`, `defect`; those
    of `Attempts`, `EvictionWatch`, `HedgedGets` and `ServerBudget`.
    """

    medium: ClassVar[Medium] = REMOTE
    options: RemoteOptions

    def __init__(self, options: RemoteOptions, wall_ns: Callable[[], int] = time.time_ns) -> None:
        super().__init__(options)
        self._wall_ns = wall_ns
        self.counters: Counter[str] = Counter()
        self._transport: Transport
        self._context: TierContext
        self._rows: Rows
        self._memory = memoryview(b"")
        self._namespace = b""
        self._names: BlockNames
        self._epoch: SharedEpoch
        self._attempts: Attempts
        self._hedged: HedgedGets | None = None
        self._evictions: EvictionWatch | None = None
        self._lease: LeaseKeeper | None = None
        self._budget: ServerBudget | None = None
        self._moving: set[asyncio.Future[list[None]]] = set()
        self._generation = 0
        self._opened = self._ready = self._closing = False
        self._releasing = asyncio.Lock()

    @abstractmethod
    def _make_transport(self) -> Transport:
        """The transport of the options; not open yet."""

    # -- open and close ------------------------------------------------------------------------------------------

    async def open(self, context: TierContext) -> Opened:
        """Connect, and make the namespace's marker if it is new. Raises ConfigError, ResourceError; then nothing stays
        open."""
        if self._opened or self._closing:
            raise UsageError("this tier was opened before; make a new one")
        if context.rows is None:
            raise UsageError("a remote tier moves rows of the shared region and was given none")
        self._opened = True
        self._transport = self._make_transport()
        try:
            return await self._open(context, context.rows)
        except BaseException:
            await self._release()
            raise

    async def _open(self, context: TierContext, rows: Rows) -> Opened:
        self._context, self._rows, self._namespace = context, rows, context.namespace.digest()
        self._memory = rows.view.reshape(-1).data
        self._hedged = HedgedGets(context.clock, self.counters) if self._transport.hedges else None
        self._names = BlockNames(self._transport.name_format, self.options.prefix, self._namespace)
        notes = await self._open_budget()
        facts = await self._transport.open()
        lateness = self._transport.lateness if isinstance(self._transport, ReportsLateness) else None
        limit = CallLimit(self._transport.concurrency, facts.flight_bytes, lateness)
        self._attempts = Attempts(limit, self.counters)
        self._epoch = SharedEpoch(self._read_marker, self._swap_marker, INCARNATION_BYTES)
        try:
            is_new = await self._epoch.begin(context.new_epoch or 0)
        except OSError as error:
            if error.errno == errno.EACCES:
                reason = f"the server does not let this user read and write {self._names.marker}"
                raise ConfigError(reason, self.options.RIGHTS_KEY) from error
            raise ResourceError(f"the epoch of the namespace cannot be read ({error.strerror})") from error
        notes += await self._describe(context.namespace.manifest())
        self._lease = LeaseKeeper(self._transport, self._epoch, self._names, self.counters)
        await self._lease.begin(facts.capacity_bytes)
        self._evictions = EvictionWatch(self._transport, context.clock, self.counters)
        await self._evictions.begin()
        self._ready = True
        epoch = self._epoch.now
        notes = facts.notes + notes
        opened = Opened(facts.capacity_bytes, epoch=epoch, is_new_epoch=is_new, mode="remote", notes=notes)
        first, probe = facts.look_up_before_store, facts.probe_prefix
        return replace(opened, look_up_before_store=first, probe_prefix=probe)

    async def _describe(self, manifest: str) -> tuple[str, ...]:
        """Keep the namespace's readable manifest beside its blocks. Returns a note if that is not possible."""
        if not isinstance(self._transport, StoresManifest):
            return ()
        try:
            await self._transport.describe(self._names.manifest, manifest)
        except OSError as error:
            return (f"the readable manifest could not be written ({error.strerror})",)
        return ()

    async def _open_budget(self) -> tuple[str, ...]:
        """Read how much may still be written. Returns notes for people. Raises ConfigError."""
        per_day = self.options.write_bytes_per_day
        if per_day is None:
            return ()
        largest = value_bytes_max(self._context.geometry)
        self._budget = ServerBudget(per_day, largest, self.options.budget_file, self.counters)
        return await self._budget.open()

    async def close(self) -> None:
        """Let requests end within the deadline, then disconnect. Idempotent.

        Blocks whose request had not begun are dropped. Requests that are stuck are counted in `close.stuck`; their
        threads stay until they end.
        """
        self._closing = True
        async with self._releasing:
            if self._opened:
                await self._release()

    async def _release(self) -> None:
        self._closing = True
        if self._moving:
            await asyncio.wait(self._moving, timeout=self.options.close_timeout_seconds / 2)
        if self._evictions is not None:
            await self._evictions.close()
        if self._lease is not None:
            await self._lease.close()
        clock, seconds = asyncio.get_running_loop().time, self.options.close_timeout_seconds / 2
        deadline = clock() + seconds
        used = [one for one in (self._transport, self._budget) if one is not None]
        stuck = sum(await asyncio.gather(*(one.close(seconds) for one in used)))
        if self._hedged is not None:  # after the transport, whose last gets its threads copy into rows
            stuck += await self._hedged.close(max(0.0, deadline - clock()))
        self.counters["close.stuck"] = stuck
        if stuck:
            _log.warning("%s: %d threads are stuck in requests", self.options.label, stuck)

    def _check_open(self) -> None:
        if not self._ready:
            raise UsageError("this tier is not open")

    # -- lookups and epochs --------------------------------------------------------------------------------------

    async def lookup(self, keys: Sequence[OffloadKey]) -> Sequence[LookupResult]:
        """HIT for a key whose value is there with the right length, MISS for any other; RETRY for those whose server
        did not answer, because that is no miss. Values are not read; a load does that."""
        self._check_open()
        known = [key for key in keys if self._is_known(key)]
        if self._closing or not known:
            return [LookupResult.MISS] * len(keys)
        try:
            with self._attempts.limit.lookup_priority():
                found = await self._transport.present(self._places(known))
        except OSError:
            self.counters["lookup.failed"] += 1
            return [LookupResult.RETRY] * len(keys)
        self.counters["lookup.failed"] += None in found
        results = {key: _RESULTS[there] for key, there in zip(known, found, strict=True)}
        return [results.get(key, LookupResult.MISS) for key in keys]

    async def state_epoch(self, epoch: int) -> int:
        """See `StatesEpoch`."""
        self._check_open()
        try:
            return await self._epoch.state(epoch)
        except OSError as error:
            raise self._epoch_error(error) from error

    def leave_epoch(self) -> None:
        """See `StatesEpoch`."""
        self._epoch.leave()

    async def reset(self, epoch: int) -> None:
        """Raise the namespace's epoch on the server before this returns. Raises ResourceError if that failed; then it
        holds for this process, which stores nothing before the server has taken the epoch.

        A process that has not reset goes on among its like under the old epoch, which this one finds nothing of.
        """
        self._check_open()
        if self._closing:
            raise UsageError("this tier is not open")
        try:
            await self._epoch.reset(epoch)
        except OSError as error:
            raise self._epoch_error(error) from error
        if self._lease is not None:
            self._lease.marker_changed()

    def _read_marker(self) -> Awaitable[Marker | None]:
        return self._transport.read_marker(self._names.marker)

    def _swap_marker(self, held: Marker | None, marker: Marker) -> Awaitable[Marker | None]:
        return self._transport.swap_marker(self._names.marker, held, marker)

    def _epoch_error(self, error: OSError) -> ResourceError:
        self.counters["reset.failed"] += 1
        return ResourceError(f"the epoch cannot be raised on the server ({error.strerror})")

    def _is_known(self, key: OffloadKey) -> bool:
        return key_group(key) < self._context.geometry.num_groups and len(key) <= KEY_BYTES_MAX

    def _places(self, keys: Sequence[OffloadKey]) -> list[ValueRef]:
        name, size_of = self._names.namer(self._epoch.marker(self._epoch.now)), self._context.geometry.aligned_bytes
        return [ValueRef(name(key), header_bytes(key), size_of(key_group(key))) for key in keys]

    # -- jobs ----------------------------------------------------------------------------------------------------

    async def store(self, job: TransferJob) -> JobResult:
        """Write the job's blocks; one outcome for each (see the class). Returns once no request uses its rows."""
        self._check_open()
        started = self._context.clock()
        refusal = self._refusal(job) or await self._epoch_refusal(job.epoch)
        if refusal is None and job.epoch < self._epoch.now:
            refusal = dropped(DropReason.RESET)
        return await self._run(job, JobKind.STORE, refusal, started)

    async def load(self, job: TransferJob) -> JobResult:
        """Read and verify the job's blocks; one outcome for each (see the class). Returns once no request uses their
        rows. The bytes of a row count only after LOADED."""
        self._check_open()
        refusal = self._refusal(job) or (MISSING if job.epoch < self._epoch.now else None)
        return await self._run(job, JobKind.LOAD, refusal, self._context.clock())

    async def _epoch_refusal(self, epoch: int) -> BlockOutcome | None:
        """The reason why nothing can be stored under an epoch now: its marker could not be raised. None if it has been.

        Other tiers of a stack may be ahead of this one's marker; their epoch is the stack's, and holds here too.
        """
        try:
            await self._epoch.reset(epoch)
        except OSError as error:
            self.counters["reset.failed"] += 1
            return failed(error.errno or 0)
        return None

    def _refusal(self, job: TransferJob, seconds: float = 0.0) -> BlockOutcome | None:
        """The reason why no further block of a job begins that many seconds from now."""
        if self._closing:
            return dropped(DropReason.CLOSING)
        return LATE if job.deadline is not None and self._context.clock() + seconds > job.deadline else None

    async def _run(self, job: TransferJob, kind: JobKind, refusal: BlockOutcome | None, started: float) -> JobResult:
        check_job(job, self._context.geometry.num_groups, self._rows.num_rows)
        if refusal is not None:
            return JobResult.uniform(job, refusal)
        if self._evictions is not None:
            self._evictions.poll()
        run, cancelled = JobRun(job, kind, asyncio.get_running_loop()), asyncio.Event()

        def refuse(seconds: float) -> BlockOutcome | None:
            return CANCELLED if cancelled.is_set() else self._refusal(job, seconds)

        moving = asyncio.gather(*(self._move_batch(run, batch, refuse) for batch in self._batches(self._blocks(run))))
        self._moving.add(moving)
        moving.add_done_callback(self._moving.discard)
        await shielded_wait(moving, cancelled.set)
        return run.result(self._context.clock() - started)

    def _blocks(self, run: JobRun) -> Iterator[RemoteBlock]:
        """A job's blocks, without those whose key is too long. Raises UsageError for a key of another group."""
        storing, row_bytes = run.kind is JobKind.STORE, self._rows.row_bytes
        marker = self._epoch.marker(run.job.epoch)
        headers, name = Headers(self._namespace, marker), self._names.namer(marker)
        for number, group in enumerate(run.groups):
            size = self._context.geometry.aligned_bytes(group.group)
            for position, (key, row) in enumerate(zip(group.keys, group.rows, strict=True)):
                if key_group(key) != group.group:
                    raise UsageError(f"a key of another group is in the share of group {group.group}")
                if len(key) > KEY_BYTES_MAX:
                    run.end(number, position, dropped(DropReason.KEY_TOO_LONG))
                    continue
                payload = self._memory[row * row_bytes : row * row_bytes + size]
                front = b""
                if storing:
                    front = headers.encoded(key, size, self._next_generation(), self._rows.checksum(row))
                value = Value(ValueRef(name(key), header_bytes(key), size), payload, front)
                yield RemoteBlock(number, position, row, value, key, headers)

    def _next_generation(self) -> int:
        """Comparable between hosts as well as their clocks are."""
        self._generation = next_generation(self._generation, self._wall_ns())
        return self._generation

    def _batches(self, blocks: Iterator[RemoteBlock]) -> Iterator[list[RemoteBlock]]:
        """Blocks by calls: each has those of one server, as many as the transport takes."""
        if not isinstance(self._transport, Sharded):
            yield from self._of_one_server(blocks)
            return
        by_server: dict[str, list[RemoteBlock]] = {}
        for block in blocks:
            by_server.setdefault(self._transport.server_of(block.value.place), []).append(block)
        for some in by_server.values():
            yield from self._of_one_server(some)

    def _of_one_server(self, blocks: Iterable[RemoteBlock]) -> Iterator[list[RemoteBlock]]:
        batch: list[RemoteBlock] = []
        size = 0
        for block in blocks:
            length = block.value.place.payload_bytes
            if batch and (len(batch) == self._transport.batch_blocks or size + length > self._transport.batch_bytes):
                yield batch
                batch, size = [], 0
            batch.append(block)
            size += length
        if batch:
            yield batch

    async def _move_batch(self, run: JobRun, batch: Sequence[RemoteBlock], refuse: Refusal) -> None:
        """Move blocks by one call; each ends with an outcome, whatever happens."""
        call = self._put if run.kind is JobKind.STORE else self._get
        payload_bytes = sum(block.value.place.payload_bytes for block in batch)
        try:
            outcomes = await self._attempts.make(call, batch, refuse, payload_bytes)
        except Exception:
            # The task's boundary: without an outcome the job would wait for these blocks for ever.
            _log.exception("%s: blocks could not be moved", self.options.label)
            self.counters["defect"] += 1
            outcomes = [failed(errno.EIO)] * len(batch)
        for block, outcome in zip(batch, outcomes, strict=True):
            if outcome.status is BlockStatus.FAILED:
                self.counters[f"errno.{errno.errorcode.get(outcome.errno, outcome.errno)}"] += 1
            size = block.value.place.payload_bytes if outcome.ok else 0
            run.end(block.group, block.position, outcome, size)
        if self._lease is not None and run.kind is JobKind.STORE:
            self._lease.stored(payload_bytes)

    async def _put(self, batch: Sequence[RemoteBlock]) -> list[BlockOutcome]:
        values = [block.value for block in batch]
        if self._budget is None:
            return await self._transport.put(values)
        sizes = [value.place.header_bytes + value.place.payload_bytes for value in values]
        within = await self._budget.take(sizes)
        outcomes = await self._transport.put(values[:within]) if within else []
        return [*outcomes, *[dropped(DropReason.WRITE_BUDGET)] * (len(batch) - within)]

    async def _get(self, batch: Sequence[RemoteBlock]) -> list[BlockOutcome]:
        if self._hedged is None:
            outcomes = await self._transport.get([block.value for block in batch], self._verifier(batch))
        else:
            outcomes = [await self._hedged.get(self._begin_get, block) for block in batch]
        corrupt = [block for block, outcome in zip(batch, outcomes, strict=True) if outcome == CORRUPT]
        self.counters.update(f"mismatch.{block.found}" for block in corrupt if isinstance(block.found, Mismatch))
        if corrupt:
            with suppress(OSError):  # it is refused by the next load as well
                await self._transport.remove([block.value.place for block in corrupt])
            expired = {id(block) for block in corrupt if block.found is Mismatch.GENERATION}
            outcomes = [MISSING if id(block) in expired else one for block, one in zip(batch, outcomes, strict=True)]
        for block, outcome in zip(batch, outcomes, strict=True):
            if outcome.ok and isinstance(block.found, bytes):
                self._rows.set_checksum(block.row, block.found)
        return outcomes

    def _begin_get(self, block: RemoteBlock) -> asyncio.Future[list[BlockOutcome]]:
        return asyncio.ensure_future(self._transport.get([block.value], self._verifier([block])))

    def _verifier(self, batch: Sequence[RemoteBlock]) -> Callable[[int, memoryview], BlockOutcome]:
        ages = age_limit(self.options.max_age, self._wall_ns())

        def check(position: int, page: memoryview) -> BlockOutcome:
            block = batch[position]
            block.found = block.headers.verify(page, block.value.payload, block.key, ages)
            if block.found is Mismatch.OTHER_VERSION:
                return MISSING
            return CORRUPT if isinstance(block.found, Mismatch) else LOADED

        return check

"""The base of both filesystem tiers: their options, the probe of their disks, and the order of open and close."""

import asyncio
import logging
import mmap
from abc import abstractmethod
from collections import Counter
from collections.abc import Coroutine
from typing import Any, ClassVar

from kvtier.aio.daemon_pool import DaemonPool
from kvtier.errors import ResourceError, UsageError
from kvtier.options import TierOptions, folders_of
from kvtier.tier.contract import LoadStore, Opened, Rows, TierContext
from kvtier.types.jobs import JobKind, JobResult, TransferJob
from kvtier.types.keys import FS, Medium
from kvtier_fs.io.probe import probe_path
from kvtier_fs.options import RootOptions

_log = logging.getLogger("kvtier.fs")


class RootTier(LoadStore):
    """A tier of blocks in one or more root folders. It is opened once; a failed open releases all it took.

    A layout implements `_open`, `_run` and `_release`. `_release` may be called again, until it has released all.
    """

    medium: ClassVar[Medium] = FS
    BLOCK_SIZE_ALIGNMENT: ClassVar[int] = mmap.PAGESIZE
    options: RootOptions

    def __init__(self, options: TierOptions) -> None:
        super().__init__(options)
        self.counters: Counter[str] = Counter()
        self._context: TierContext
        self._namespace = b""
        self._opened = False
        self._closing = False
        self._releasing = asyncio.Lock()

    async def probe_alignment(self) -> int:
        """The largest alignment over the roots: pages, buffers and offsets of direct I/O. Leaves nothing behind.

        A root that does not exist yet is judged by the folder it will be created in. One that cannot be probed counts
        as page-aligned; `open` reports its error. Raises ResourceError for what has to do with none of the roots.
        """
        if self.options.direct == "off":
            return mmap.PAGESIZE
        threads = DaemonPool("kvtier-fs-probe", 2)
        try:
            loop = asyncio.get_running_loop()
            probes = [loop.run_in_executor(threads, probe_path, root) for root in folders_of(self.options)]
            return max(await asyncio.gather(*probes))
        except OSError as error:
            raise ResourceError(f"the disks of the roots cannot be probed ({error.strerror})") from error
        finally:
            await threads.close(self.options.close_timeout_seconds)

    async def open(self, context: TierContext) -> Opened:
        """Open the roots. Raises RootError, GeometryError or ResourceError; then nothing stays open."""
        if self._opened or self._closing:
            raise UsageError("this tier was opened before; make a new one")
        rows = context.rows
        if rows is None:
            raise UsageError("a filesystem tier moves rows of the shared region and was given none")
        if not rows.view.flags.c_contiguous:
            raise UsageError("the rows of the shared region must follow each other without gaps")
        self._opened = True
        try:
            self._context, self._namespace = context, context.namespace.digest()
            return await self._open(context, rows)
        except BaseException:
            await self._release()
            raise

    def store(self, job: TransferJob) -> Coroutine[Any, Any, JobResult]:
        """Write the job's blocks; one outcome for each (see the class). Returns once no I/O uses the job's rows."""
        return self._run(job, JobKind.STORE)

    def load(self, job: TransferJob) -> Coroutine[Any, Any, JobResult]:
        """Read and verify the job's blocks; one outcome for each (see the class). Returns once no I/O uses their rows.

        The bytes of a row count only after LOADED.
        """
        return self._run(job, JobKind.LOAD)

    async def close(self) -> None:
        """Let I/O end within `close_timeout_seconds`, then release everything. Idempotent.

        Blocks whose I/O had not begun are dropped. Blocks whose I/O is stuck are reported late and counted in
        `close.stuck`; their files, memory and threads stay in use until that I/O has ended.
        """
        self._closing = True
        async with self._releasing:
            await self._release()

    @abstractmethod
    async def _open(self, context: TierContext, rows: Rows) -> Opened: ...

    @abstractmethod
    async def _run(self, job: TransferJob, kind: JobKind) -> JobResult:
        """Move a job's blocks. If it raises, no I/O uses their rows."""

    @abstractmethod
    async def _release(self) -> None: ...

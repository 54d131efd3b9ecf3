"""Write budget of a process for one server: bytes in any 24 hours, also over restarts."""

from __future__ import annotations

import asyncio
import os
import struct
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, suppress

from kvtier.aio.boot_clock import BootClock, read_boot_clock
from kvtier.aio.daemon_pool import DaemonPool
from kvtier.aio.process_lock import locked_file
from kvtier.errors import ConfigError
from kvtier.tier.checksum import seal, unseal

_DAY_NS = 86_400 * 10**9
_BUCKETS_IN_A_DAY = 24
_SHARES_IN_A_BUCKET = 64
PATIENCE_SECONDS = 0.25
"""Time that values wait for a charge of the file, counted from its beginning. A disk that hangs delays them once."""
_MAGIC = b"KVTIERWB"
_RECORD = struct.Struct("<16sQQ")
_RECORD_BYTES = 64
_LOCKED = "another process keeps its write budget there; the one of this process starts empty"


class TokenBucket:
    """A token bucket of whole bytes that gives at most `bytes_per_day` in any 24 hours.

    It holds `capacity_bytes`, an hour's share, and fills with the rest of `bytes_per_day` in a day: what it held at
    first is part of the sum, not in addition to it.
    """

    def __init__(self, bytes_per_day: int) -> None:
        self.capacity_bytes = bytes_per_day // _BUCKETS_IN_A_DAY
        self._refill = bytes_per_day - self.capacity_bytes
        self._parts = 0  # bytes * _DAY_NS, so that nothing is rounded
        self.at_ns = 0

    def start(self, level_bytes: int, at_ns: int) -> None:
        """Begin with the bytes that it held at some time."""
        self._parts = min(level_bytes, self.capacity_bytes) * _DAY_NS
        self.at_ns = at_ns

    def fill(self, now_ns: int) -> None:
        """Let time pass. Time that goes back fills nothing, and neither does the same time again."""
        elapsed = max(0, now_ns - self.at_ns)
        self._parts = min(self._parts + elapsed * self._refill, self.capacity_bytes * _DAY_NS)
        self.at_ns += elapsed

    @property
    def level_bytes(self) -> int:
        """Bytes that it holds."""
        return self._parts // _DAY_NS

    def above(self, other: TokenBucket) -> int:
        """The bytes that it holds more than another one."""
        return (self._parts - other._parts) // _DAY_NS

    def take(self, num_bytes: int) -> None:
        """Take bytes that it holds."""
        self._parts -= num_bytes * _DAY_NS


class BudgetFile:
    """A budget's level on disk, of one process at a time: the file is locked until the process ends. Blocking calls.

    One record of 64 bytes with a checksum, overwritten in place. One that is not whole counts as an empty bucket. So
    does time that cannot be measured: only that since a write under the same start of the machine counts.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._fd = -1
        self._locked = ExitStack()

    def open(self) -> bool:
        """Open and lock the file. False if another process has locked it; raises OSError."""
        with suppress(FileExistsError):
            os.mkdir(os.path.dirname(self.path), 0o700)
        try:
            self._fd = self._locked.enter_context(locked_file(self.path))
        except TimeoutError:
            return False
        return True

    def read(self, clock: BootClock) -> tuple[int, int]:
        """The level that was written last, and when. Raises OSError."""
        now, body = clock.now_ns(), unseal(_MAGIC, os.pread(self._fd, _RECORD_BYTES, 0))
        if body is None or len(body) < _RECORD.size:
            return 0, now
        boot, at, level = _RECORD.unpack_from(body)
        if boot != clock.boot:
            return level, now
        return (level, at) if at <= now else (0, now)  # the clock does not go back: no process wrote that

    def write(self, clock: BootClock, at_ns: int, level_bytes: int) -> None:
        """Make a level durable. Raises OSError."""
        record = seal(_MAGIC, _RECORD.pack(clock.boot, at_ns, level_bytes), _RECORD_BYTES)
        if os.pwrite(self._fd, record, 0) != _RECORD_BYTES:
            raise OSError("a record was written in part")
        os.fdatasync(self._fd)

    def close(self) -> None:
        """Unlock the file. Idempotent."""
        self._locked.close()


class ServerBudget:
    """Bytes that one process may still write to a server.

    With a file the level outlives the process. It is charged there before anything is written to the server, a minute's
    share at a time, or a block where that is more. A process that is killed loses what is left of what was charged and
    never gains. The next share is charged before the last one is used up, so that values seldom wait for the disk.
    Without a file, or while another process has it, the process starts with an empty bucket.

    `counters`: `budget.failed`, the file could not be written.
    """

    def __init__(
        self,
        bytes_per_day: int,
        value_bytes_max: int,
        path: str | None,
        counters: Counter[str],
        clock: BootClock | None = None,
    ) -> None:
        self._bucket = TokenBucket(bytes_per_day)
        self._on_disk = TokenBucket(0)
        """The bucket that a process would find that starts now: empty without a file. Never more than `_bucket`."""
        self._bytes_per_day = bytes_per_day
        self._share_bytes = max(value_bytes_max, self._bucket.capacity_bytes // _SHARES_IN_A_BUCKET)
        self._path = path
        self._file: BudgetFile | None = None
        self._clock = clock or read_boot_clock()
        self._counters = counters
        self._threads = DaemonPool("kvtier-budget", 1)
        self._charging: asyncio.Future[bool] | None = None
        self._charging_since = 0.0
        self._closed = False

    async def open(self) -> tuple[str, ...]:
        """Read the file, if there is one. Returns notes for people to read. Raises ConfigError."""
        if self._share_bytes > self._bucket.capacity_bytes:
            least = -(-_BUCKETS_IN_A_DAY * self._share_bytes >> 20)
            reason = f"an hour's share of it is less than a block; write at least {least}MiB"
            raise ConfigError(reason, "write_bytes_per_day")
        self._bucket.start(0, self._clock.now_ns())
        if self._path is None:
            return ()
        try:
            self._file = await self._threads.run(_open_file, self._path)
            if self._file is None:
                return (f"{self._path}: {_LOCKED}",)
            level, at = await self._threads.run(_read_file, self._file, self._clock)
        except OSError as error:
            raise ConfigError(f"{self._path}: {error.strerror or error}", "state_folder") from error
        self._on_disk = TokenBucket(self._bytes_per_day)
        for bucket in (self._bucket, self._on_disk):
            bucket.start(level, at)
        self._charge(self._bytes_left())
        return ()

    async def take(self, sizes: Sequence[int]) -> int:
        """Take the bytes of the first values that may be written now, and return how many they are.

        Waits for the file alone, and not longer than PATIENCE_SECONDS."""
        while (left := self._bytes_left()) < sum(sizes) and await self._wait_for_charge(sum(sizes) - left):
            pass
        for taken, size in enumerate(sizes):
            if size > left:
                return taken
            left -= size
            self._bucket.take(size)
        if left < self._share_bytes:
            self._charge(0)
        return len(sizes)

    def _bytes_left(self) -> int:
        """The bytes that may be written now: those that are gone for a process that starts after this one."""
        now = 0 if self._closed else self._clock.now_ns()
        self._bucket.fill(now)
        self._on_disk.fill(now)
        return 0 if self._closed else self._bucket.above(self._on_disk)

    def _charge(self, num_bytes: int) -> asyncio.Future[bool] | None:
        """Begin to charge a share on disk, or `num_bytes` where that is more. None if the bucket holds none.

        A rest of less than a share is charged with it: it could not be used before it has grown.
        """
        if self._charging is None:
            level = self._on_disk.level_bytes
            # The bucket may be near empty for hours. Then a share is waited for, because each is a write to a disk.
            if self._file is None or level < self._share_bytes:
                return None
            rest = level - max(self._share_bytes, num_bytes)
            self._charging_since = time.monotonic()
            self._charging = asyncio.ensure_future(self._write_charge(rest if rest >= self._share_bytes else 0))
        return self._charging

    async def _wait_for_charge(self, num_bytes: int) -> bool:
        """False if the bucket holds no share, or if the file is not written in time."""
        charging = self._charge(num_bytes)
        if charging is None:
            return False
        patience = self._charging_since + PATIENCE_SECONDS - time.monotonic()
        if patience > 0:
            await asyncio.wait((charging,), timeout=patience)
        return charging.done() and charging.result()

    async def _write_charge(self, level: int) -> bool:
        at = self._on_disk.at_ns
        try:
            if self._file is None:  # closed meanwhile
                return False
            await self._threads.run(self._file.write, self._clock, at, level)
        except OSError:
            self._counters["budget.failed"] += 1
            return False
        finally:
            self._charging = None
        self._on_disk.start(level, at)
        return True

    async def close(self, timeout_seconds: float) -> int:
        """Give back what is left, and the file. Returns how many threads are stuck at the deadline. Idempotent."""
        self._bytes_left()
        self._closed, file, self._file = True, self._file, None
        if file is not None:
            level = self._bucket.level_bytes
            self._threads.submit(_write_and_close, file, self._clock, self._bucket.at_ns, level)
        return await self._threads.close(timeout_seconds)


def _open_file(path: str) -> BudgetFile | None:
    file = BudgetFile(path)
    return file if file.open() else None


def _read_file(file: BudgetFile, clock: BootClock) -> tuple[int, int]:
    """Read the file and write it again, so that from now on time counts that did not so far."""
    level, at = file.read(clock)
    file.write(clock, at, level)
    return level, at


def _write_and_close(file: BudgetFile, clock: BootClock, at_ns: int, level_bytes: int) -> None:
    try:
        with suppress(OSError):  # then it stays charged
            file.write(clock, at_ns, level_bytes)
    finally:
        file.close()

"""Rows that outlive a stack process: what the process before has left in them is served again by the next one.

The service manager keeps three descriptors over a restart: of the rows, of the control area beside them, and of the row
table. The next process maps the rows, and lends all of them to itself. Once the first engine has joined it is known
whose blocks they hold: rows with a block of these keys become fills, which end when the bytes match their checksum;
rows that a worker of the former process may still write or read wait for that worker; the others are free. A worker is
gone when its process has exited, or when it has connected to the process of today and has no copy of before left: it
says so (`Ready`). Those of another PID namespace can only say so.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Protocol, runtime_checkable

from kvtier.control.plane.control_plane import ControlPlane
from kvtier.control.tiers.slot_table import LENT
from kvtier.errors import ConfigError
from kvtier.service.namespaces import with_first
from kvtier.service.row_table import FoundRows, RowTable, Worker
from kvtier.service.service_manager import ServiceManager
from kvtier.tier.checksum import SHORT_BYTES, checksum
from kvtier.tier.contract import Rows
from kvtier.types.keys import GroupIndex, OffloadKey, key_group

TABLE = "kvtier-table"
NAMES = ("kvtier-rows", "kvtier-control", TABLE)
AGAIN_SECONDS = 5.0
"""How long after a worker could not be watched, such as for lack of a descriptor, that is tried again."""
VERIFIED_AT_ONCE = 256
"""Rows that are read in one go before they are found again."""

_log = logging.getLogger(__name__)


@runtime_checkable
class KeepsRows(Protocol):
    """A CPU tier whose rows may be those of a former process."""

    def keep(self, rows_fd: int, control_fd: int, let_go: Callable[[], None]) -> None:
        """Have `open` take these rows, if they are of its shape. The caller keeps the descriptors; otherwise `open`
        calls `let_go`, in a thread, so that there is memory for others, and makes those."""


class KeptMemory:
    """The rows of one pool after another, and their table, with a service manager that keeps them.

    A pool calls `give` before its CPU tier opens, `take` after that, and `join` with its first namespace. `held` rows
    wait for the `former` workers, which may copy into or out of them; `lost` ones are of no use any more.
    """

    def __init__(self, manager: ServiceManager) -> None:
        self.table: RowTable | None = None
        self.former: list[Worker] = []
        self._manager = manager
        self._stored: list[int] = []
        self._found: FoundRows | None = None
        self._lent: list[int] = []
        self.held: list[int] = []
        self.lost: frozenset[int] = frozenset()
        self.has_joined = False
        self._begin()

    def _begin(self) -> None:
        """Take what a former process has left, unless it is not to be believed."""
        stored = [self._manager.stored.pop(name, -1) for name in NAMES]
        if max(stored) < 0:
            return
        try:
            if min(stored) < 0:
                raise ConfigError("they are not complete")
            table = RowTable.read(stored[2])
            if not table.is_live:
                raise ConfigError("their table was not in order when it ended")
        except (ConfigError, OSError) as error:
            _log.warning("rows of the process before are not used: %s", error)
            for fd in filter(lambda fd: fd >= 0, stored):
                os.close(fd)
            self.drop()
            return
        self.table, self._stored = table, stored[:2]
        for worker, times in Counter(table.workers).items():
            self.former.append(worker)
            for _ in range(times - 1):  # of several lives before
                table.remove_worker(worker)

    # -- opening -------------------------------------------------------------------------------------------------

    def give(self, cpu: object) -> None:
        """Offer the rows of the former process to a CPU tier that is to be opened. Where that fails, the next one is
        offered them too."""
        if self._stored and isinstance(cpu, KeepsRows):
            rows_fd, control_fd = self._stored
            cpu.keep(rows_fd, control_fd, self._let_go)

    def _let_go(self) -> None:
        """The rows of the former process are not of the shape of today."""
        while self._stored:
            os.close(self._stored.pop())
        self.drop()

    def drop(self) -> None:
        """Have the manager keep no rows any more, which would be memory beside that of the next ones."""
        self._manager.drop(NAMES)

    async def take(self, plane: ControlPlane, descriptors: tuple[int, int]) -> None:
        """The CPU tier is open, with these descriptors: no other row of it is free while they may hold blocks."""
        self.has_joined = False
        control, num_rows = plane.control, len(plane.control.cpu.table)
        is_taken = bool(self._stored) and all(map(os.path.sameopenfile, self._stored, descriptors))
        while self._stored:
            os.close(self._stored.pop())
        if self.table is not None and not (is_taken and self.table.num_rows == num_rows):
            self.table.void()  # the manager may have it still
            self.table.close()
            self.table, self.former = None, []
        if self.table is None:
            self._found, self._lent, self.held, self.lost = None, [], [], frozenset()
            self.table = RowTable.create(num_rows)
            self._manager.keep(dict(zip(NAMES, (*descriptors, self.table.fd), strict=True)))
            self.table.take_over(control.cpu.table)
            return
        self._found = await asyncio.to_thread(self.table.find)
        control.cpu.table.next_generation = self._found.generation + 1
        self._lent = control.cpu.lend(num_rows)

    def join(
        self, plane: ControlPlane, digest: bytes, prefixes: set[bytes]
    ) -> tuple[Sequence[int], Sequence[OffloadKey]]:
        """The first engine has joined, in this namespace: (rows, keys) to verify, oldest first.

        Namespaces of other keys are added to `prefixes`. Afterwards all rows are free, held, or to be verified.
        """
        assert self.table is not None
        cpu, table, found, spaces = plane.control.cpu, self.table, self._found, [digest]
        rows: Sequence[int] = ()
        keys: Sequence[OffloadKey] = ()
        if found is not None and self._is_current(plane):
            rows = found.rows
            spaces, keys = with_first(digest, table.spaces, found.keys)
            prefixes.update(spaces[1:])
        held = found.held if found is not None and self.former else frozenset()
        self.lost = lost = found.lost if found is not None else frozenset()
        named = set(rows)
        if found is not None:
            table.void()  # until it is whole again
            cpu.fill_lent(rows, keys)
            cpu.table.set_generations(rows, range(cpu.table.next_generation, cpu.table.next_generation + len(rows)))
            table.take_over(cpu.table)
            if table.spaces[:1] == [digest]:  # their names are there: to write millions again takes seconds
                table.leave_to_workers(rows)
            else:
                table.record(rows, keys)
        self.held = sorted(held - lost)
        cpu.pin([row for row in self.held if row in named])
        plane.return_lent([row for row in self._lent if row not in named and row not in held and row not in lost])
        if lost:
            _log.warning("%d rows are out of use: I/O of a former process into them may not have ended", len(lost))
        self._found, self._lent, self.has_joined = None, [], True
        table.begin(spaces, plane.control.epoch)
        return rows, keys

    def add_space(self, prefix: bytes) -> None:
        """Keys with this prefix may be in rows from here on; empty: those of the first namespace."""
        if self.table is not None and prefix and prefix not in self.table.spaces:
            self.table.add_space(prefix)

    def _is_current(self, plane: ControlPlane) -> bool:
        """True unless what a lower tier holds was reset while no process was there to reset the rows."""
        assert self.table is not None
        control = plane.control
        is_current = not (control.resets or control.joining or (control.lowers and self.table.epoch != control.epoch))
        if not is_current:
            _log.warning("rows of the process before are not used: the tiers below were reset since")
        return is_current

    def release(self, plane: ControlPlane) -> None:
        """No worker of the former process has a copy in flight any more. Pump afterwards."""
        state, held, self.held = plane.control.cpu.table.state, self.held, []
        lent = [row for row in held if state[row] == LENT]
        plane.control.cpu.unpin([row for row in held if state[row] != LENT])
        plane.return_lent(lent)

    # -- workers -------------------------------------------------------------------------------------------------

    def begin_worker(self, worker: Worker) -> None:
        """A worker has connected."""
        if self.table is not None:
            self.table.add_worker(worker)

    def end_worker(self, worker: Worker) -> None:
        """A worker has no copy in flight any more, and begins none."""
        if self.table is not None:
            self.table.remove_worker(worker)

    def end_former(self, worker: Worker) -> bool:
        """So has one of the former process. True if none of that is left."""
        if worker not in self.former:
            return False
        self.former.remove(worker)
        self.end_worker(worker)
        return not self.former

    # -- resets --------------------------------------------------------------------------------------------------

    def on_reset(self, epoch: int) -> None:
        """A later process finds nothing of what the rows held, unless the tiers below are in this epoch too; nor before
        the first engine has joined, while the table is still that of the process before."""
        if self.table is not None:
            self.table.epoch = epoch
            if not self.has_joined:
                self.table.void()

    def void(self) -> None:
        """A later process finds nothing in these rows: the weights of blocks in them are not those of their name."""
        if self.table is not None:
            self.table.void()


def intact_rows(rows: Rows, some: Sequence[int], nbytes: int) -> list[bool]:
    """For each of some rows: True if its block, of so many bytes, still matches its checksum."""
    return [is_intact(rows, row, nbytes) for row in some]


def is_intact(rows: Rows, row: int, nbytes: int) -> bool:
    """True if the row's block, of so many bytes, still matches its checksum."""
    return checksum(rows.view[row, :nbytes].data, nbytes <= SHORT_BYTES) == rows.checksum(row)


def parts_to_verify(rows: Sequence[int], keys: Sequence[OffloadKey]) -> Iterator[tuple[GroupIndex, list[int]]]:
    """Rows in parts of one group each, about in their order."""
    for first in range(0, len(rows), VERIFIED_AT_ONCE):
        of_group: dict[GroupIndex, list[int]] = {}
        end = first + VERIFIED_AT_ONCE
        for key, row in zip(keys[first:end], rows[first:end], strict=True):
            of_group.setdefault(key_group(key), []).append(row)
        yield from of_group.items()


# -- workers that may have a copy in flight -------------------------------------------------------------------------


def worker_of(token: str, participant: int, pid: int) -> Worker:
    """A worker that has connected just now. `token` is its engine's."""
    digest = blake2b(f"{token}|{participant}".encode(), digest_size=8).digest()
    return Worker(int.from_bytes(digest) | 1, pid, started(pid))


def started(pid: int) -> int:
    """The time at which a process began, in clock ticks since the start of the host; 0 if that is not known.

    No descriptor may be left, or /proc may show no process of another user.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    return int(stat.rpartition(")")[2].split()[19])


class FormerWorkers:
    """Workers of a process before, in the loop of this one. `on_gone` is called for each of them."""

    def __init__(self, workers: list[Worker], on_gone: Callable[[Worker], None]) -> None:
        self._on_gone = on_gone
        self._pidfds = dict.fromkeys(workers, -1)
        self._loop = asyncio.get_running_loop()
        for worker in workers:
            if worker.pid:
                self._watch(worker)

    def _watch(self, worker: Worker) -> None:
        if worker not in self._pidfds:
            return
        is_gone = False
        try:
            self._pidfds[worker] = os.pidfd_open(worker.pid)
        except OSError as error:
            is_gone = error.errno == errno.ESRCH
        times = started(worker.pid), worker.started  # read with the descriptor open: it is of this very process
        if is_gone or (min(times) > 0 and times[0] != times[1]):
            self._loop.call_soon(self.end, worker)
        elif self._pidfds[worker] >= 0:
            self._loop.add_reader(self._pidfds[worker], self.end, worker)
        else:
            self._loop.call_later(AGAIN_SECONDS, self._watch, worker)

    def end(self, worker: Worker) -> None:
        """A worker has exited, or is ready. Others than those of before are ignored."""
        pidfd = self._pidfds.pop(worker, None)
        if pidfd is None:
            return
        self._close(pidfd)
        self._on_gone(worker)

    def _close(self, pidfd: int) -> None:
        if pidfd >= 0:
            self._loop.remove_reader(pidfd)
            os.close(pidfd)

    def close(self) -> None:
        """Watch none any more."""
        while self._pidfds:
            self._close(self._pidfds.popitem()[1])

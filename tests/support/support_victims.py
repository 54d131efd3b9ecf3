"""Engines that are killed while they copy: a process that has loaded everything forks them, one for each seed.

Each copy writes garbage first, rests, and then does its work, so a row that is taken for whole too early has wrong
bytes. What an engine has open is in shared memory, where its killer reads it after its death.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import pickle
import random
import secrets
import signal
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from support_engine_client import EngineClient
from support_service import NAMESPACE, PAGE, block_keys, content

from faults.machine import warm
from kvtier.client.connection import Identity
from kvtier.client.engine import SchedulerClient
from kvtier.client.request import ClientRequest
from kvtier.client.worker import WorkerClient
from kvtier.tier.registry import discover
from kvtier.types.gpu_runs import GPURuns
from kvtier.types.jobs import GPUGroup, JobKind, JobResult, TransferJob
from kvtier.types.keys import GroupIndex, JobId

NUMBERS = 1536
"""Blocks that victims store and load, by number."""
RUN = 8
SLOTS = 8
STATE_BYTES = 64
COPIES, FILLS, LEASES, LENT, ENDS = 16, 17, 18, 19, 20
"""Places in the state of what is open; 0: the process to be killed; 8: it serves."""
PAUSE_SECONDS = 0.02


class SlowCopies:
    """A worker's GPU tier whose copies take a while and write garbage first."""

    def __init__(self, worker: WorkerClient, state: memoryview, rng: random.Random) -> None:
        self._worker, self._state, self._rng = worker, state, rng
        self._gpu = worker._gpu
        self._load, self._store = self._gpu.load, self._gpu.store
        self._gpu.load, self._gpu.store = self.load, self.store  # type: ignore[method-assign]

    async def load(self, job: TransferJob) -> JobResult:
        """GPU blocks to rows."""
        return await self._slowly(job, FILLS)

    async def store(self, job: TransferJob) -> JobResult:
        """Rows to GPU blocks."""
        return await self._slowly(job, COPIES)

    async def _slowly(self, job: TransferJob, what: int) -> JobResult:
        self._state[what] += 1
        if what == FILLS:
            for group in job.gpu_groups:
                self._worker._connection._link._rows.view[group.rows] = 0xEE
        await asyncio.sleep(self._rng.random() * PAUSE_SECONDS)
        result = await (self._load(job) if what == FILLS else self._store(job))
        self._state[what] -= 1
        return result


class PipeWorker:
    """A worker in another process, which is given its jobs through a pipe."""

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe

    def begin(self, job: TransferJob, life: str) -> None:
        """Begin a copy over there."""
        part = pickle.dumps((job, life))
        os.write(self._pipe, struct.pack("I", len(part)) + part)

    def close(self) -> None:
        """Nothing."""


def run_worker(worker: WorkerClient, pipe: int) -> None:
    """Copy what comes through the pipe, until its other end is closed."""
    with os.fdopen(pipe, "rb") as source:
        while head := source.read(4):
            worker.begin(*pickle.loads(source.read(struct.unpack("I", head)[0])))  # noqa: S301
    os._exit(0)


class Victim:
    """An engine that stores, reserves, holds and loads at random until it is killed."""

    def __init__(
        self, client: EngineClient, cache: torch.Tensor, state: memoryview, rng: random.Random, stays: bool
    ) -> None:
        self.client, self.cache, self.state, self.rng = client, cache, state, rng
        self.slots = list(range(SLOTS))
        self.jobs: dict[JobId, tuple[int, range, JobKind, ClientRequest | None]] = {}
        self.held: list[tuple[ClientRequest, range]] = []
        self.number = 0
        self.stays = stays

    def live(self) -> None:
        """Step until the stack process or the worker is gone; if it `stays`, until it is to end, or its parent has."""
        parent = os.getppid()
        while not self.state[ENDS] and (self.client.core.connected or (self.stays and os.getppid() == parent)):
            for result in self.client.step():
                self._end(result)
            self.rng.choice((self._store, self._store, self._reserve, self._load, self._drop))()
            self.state[LEASES] = min(255, sum(len(request.leased) for request, _ in self.held))
            self.state[LENT] = min(255, len(self.client.core._lent))
            time.sleep(self.rng.random() * 0.004)

    def _some(self) -> range:
        first = self.rng.randrange(0, NUMBERS, RUN)
        return range(first, first + RUN)

    def _begin(self, kind: JobKind, numbers: range, request: ClientRequest | None) -> None:
        slot = self.slots.pop()
        at = range(slot * RUN, slot * RUN + RUN)
        if kind is JobKind.STORE:
            self.cache[at.start : at.stop] = content(numbers)
        runs = GPURuns.whole(list(at))
        job = self.client.job(kind, [GPUGroup(GroupIndex(0), block_keys(RUN, numbers.start), runs)])
        self.jobs[job.job_id] = slot, numbers, kind, request
        self.client.submit(job, request)

    def _end(self, result: JobResult) -> None:
        slot, numbers, kind, request = self.jobs.pop(result.job_id)
        if request is not None:
            request.end()
        right, at = content(numbers), slot * RUN
        for position, outcome in enumerate(result.outcomes[0]):
            if (
                kind is JobKind.LOAD
                and outcome.ok
                and not torch.equal(self.cache[at + position].cpu(), right[position])
            ):
                os.write(2, f"WRONG BYTES in a victim: block {numbers[position]}\n".encode())
        self.slots.append(slot)

    def _store(self) -> None:
        if len(self.slots) > 2 and len(self.client.core._lent) >= RUN:
            self._begin(JobKind.STORE, self._some(), None)

    def _reserve(self) -> None:
        if len(self.held) < 6:
            self.number += 1
            numbers = self._some()
            request = self.client.request(f"r{self.number}")
            self.client.reserve(request, block_keys(RUN, numbers.start))
            self.held.append((request, numbers))

    def _load(self) -> None:
        ready = [at for at, (request, _) in enumerate(self.held) if request.served]
        if ready and self.slots:
            request, numbers = self.held.pop(ready[0])
            self._begin(JobKind.LOAD, numbers, request)

    def _drop(self) -> None:
        if self.held and self.rng.random() < 0.2:
            self.held.pop(0)[0].end()


def live(path: str, state: memoryview, seed: int, kind: str, stays: bool) -> None:
    """In a forked child: an engine of one process, on a CPU or on `cuda`, or with its worker in another one.

    One that `stays` connects to the next stack process, and is known by an id of its own.
    """
    rng = random.Random(seed)
    identity = Identity(path, NAMESPACE, f"victim{seed if stays else ''}", secrets.token_hex(16))
    cache = torch.zeros((SLOTS * RUN, PAGE), dtype=torch.uint8, device="cuda" if kind == "cuda" else "cpu")
    target = os.getpid()
    if kind in ("engine", "cuda"):
        client = EngineClient(identity, [cache])
        SlowCopies(client._worker, state, rng)
    else:
        cache.share_memory_()
        (read, written), (connected, connects) = os.pipe(), os.pipe()
        child = os.fork()
        if not child:
            os.close(written)
            gpu: Any = discover().get("gpu")
            worker = WorkerClient(identity, [cache], gpu(gpu.Options(type="gpu")))
            SlowCopies(worker, state, rng)
            os.write(connects, b".")
            run_worker(worker, read)
        os.close(read)
        os.read(connected, 1)
        target = child if kind == "worker" else target
        client = EngineClient.__new__(EngineClient)
        client._worker, client._copied, client._last_job = PipeWorker(written), deque(), 0  # type: ignore[assignment]
        SchedulerClient.__init__(client, identity)
        client.wait_joined()
    state[0:8] = struct.pack("q", target)
    state[8] = 1
    with suppress(BrokenPipeError):
        Victim(client, cache, state, rng, stays).live()
    os._exit(0)


def main(path: str, file: str) -> None:
    """Fork a victim for each line: place, seed, kind, whether it stays. Its end is nobody's business here."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with open(file, "r+b") as opened:
        states = memoryview(mmap.mmap(opened.fileno(), 0))
    print("ready", flush=True)
    for line in sys.stdin:
        place, seed, kind, stays = line.split()
        state = states[int(place) * STATE_BYTES :][:STATE_BYTES]
        if not os.fork():
            os.close(0)
            live(path, state, int(seed), kind, stays == "True")


class Victims:
    """The process that forks them, as the test has it: those at one place, one after another."""

    def __init__(self, process: subprocess.Popen[str], states: memoryview, place: int) -> None:
        self._process, self._place = process, place
        self._state = states[place * STATE_BYTES :][:STATE_BYTES]

    def begin(self, seed: int, kind: str, stays: bool = False) -> None:
        """Start a victim; `pid` is known once it serves."""
        self._state[:] = bytes(STATE_BYTES)
        assert self._process.stdin is not None
        self._process.stdin.write(f"{self._place} {seed} {kind} {stays}\n")
        self._process.stdin.flush()

    def end(self) -> None:
        """Have the victim end without a word."""
        self._state[ENDS] = 1

    @property
    def pid(self) -> int:
        """The process to be killed; 0 until the victim serves."""
        return int(struct.unpack("q", self._state[0:8])[0]) if self._state[8] else 0

    def open(self) -> dict[str, int]:
        """Copies, fills and leases that are open."""
        return {"copy": self._state[COPIES], "fill": self._state[FILLS], "lease": self._state[LEASES]}


def freeze(found: Iterable[Victims], number: int = signal.SIGSTOP) -> None:
    """Have victims stop where they are, or go on with SIGCONT."""
    for each in found:
        os.kill(each.pid, number)


def freeze_while(found: Sequence[Victims], holds: Callable[[], bool], seconds: float) -> None:
    """Freeze victims once a condition holds that still holds then, or when the time is over."""
    end = time.monotonic() + seconds
    while True:
        while not holds() and time.monotonic() < end:
            time.sleep(0.0005)
        freeze(found)
        if holds() or time.monotonic() >= end:
            return
        freeze(found, signal.SIGCONT)


@contextmanager
def victims(path: str, folder: Path) -> Iterator[Victims]:
    """A process that forks victims, one after another."""
    with several_victims(path, folder, 1) as (found,):
        yield found


@contextmanager
def several_victims(path: str, folder: Path, count: int) -> Iterator[Sequence[Victims]]:
    """A process that forks victims, so many at once."""
    file = folder / "state"
    file.write_bytes(bytes(STATE_BYTES * count))
    with open(file, "r+b") as opened:
        states = memoryview(mmap.mmap(opened.fileno(), 0))
    command, log = [sys.executable, __file__, path, str(file)], folder / "victims.log"
    with open(log, "w") as errors:
        process = warm.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True)
    with process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n", log.read_text()
            yield [Victims(process, states, place) for place in range(count)]
        finally:
            process.kill()
    said = log.read_text()
    assert "WRONG" not in said, said
    assert "Traceback" not in said, said


if __name__ == "__main__":
    main(*sys.argv[1:])

"""An engine's process of `benchmarks.service_engines`, at a `kvtier serve`."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.beside import JOB_BLOCKS
from benchmarks.fs_child import FIRST, LOAD, Content, Job, Pass, Refused, Setup
from benchmarks.peer import serve
from benchmarks.report import GIB
from benchmarks.service_engines_bare import MESSAGE_BYTES_MAX
from benchmarks.stack_process_engine import AT_ONCE, StackTiers
from kvtier.engines.process_stack import connect_engine_stack
from kvtier.service import wire
from kvtier.service.wire import Codec
from kvtier.tier.contract import LookupResult
from kvtier.tier.registry import discover
from kvtier.types.geometry import KVLayout
from kvtier.types.keys import OffloadKey
from kvtier.types.namespace import Namespace

Course = tuple[float, float, float]
"""Seconds of a turn of steps, of a step, and before the first one."""


class ServedTiers(StackTiers):
    """The stack of a service: `Setup.blocks` GPU blocks at it."""

    def __init__(self, path: str, engine_id: str = "") -> None:
        super().__init__("", 0, engine_id)
        self._path = path
        self.open_seconds = 0.0

    def open(self, setup: Setup) -> npt.NDArray[np.uint8]:
        self._blocks = setup.blocks
        tensor = torch.zeros((setup.blocks, setup.block_bytes), dtype=torch.uint8)
        namespace = Namespace(KVLayout.of_pages(setup.block_bytes))
        begun = time.perf_counter()
        self.stack = connect_engine_stack(self._path, namespace, [tensor], engine_id=self._engine_id)
        self.stack.open()
        self.open_seconds = time.perf_counter() - begun
        rows: npt.NDArray[np.uint8] = tensor.numpy()
        return rows


class EngineProcess:
    """The works that the benchmark asks this process for: each returns figures."""

    def ready(self) -> dict[str, Any]:
        """Load what is left to load: tiers are found and loaded when they are asked for."""
        for name in ("gpu", "cpu"):
            discover().get(name)
        return {}

    def open(self, path: str, block_bytes: int, blocks: int, engine_id: str = "") -> dict[str, Any]:
        """Milliseconds until it is served, with so many GPU blocks."""
        self._tiers, self._setup = ServedTiers(path, engine_id), Setup("", block_bytes, blocks, AT_ONCE)
        self._content = Content(self._tiers.open(self._setup))
        return {"ms": self._tiers.open_seconds * 1e3}

    def close(self) -> dict[str, Any]:
        """Leave the service."""
        self._tiers.close()
        return {}

    # -- rows that are warm --------------------------------------------------------------------------------------

    def store(self, numbers: int, to_disk: bool = False) -> dict[str, Any]:
        """Store the blocks of so many numbers; with `to_disk` they are in no row then."""
        for start in range(0, numbers, self._setup.blocks):
            some = min(self._setup.blocks, numbers - start)
            self._content.fill(work := Pass(FIRST, start, some, JOB_BLOCKS, AT_ONCE))
            self._tiers.move(work, work.jobs())
        if to_disk:
            self._tiers.prepare(work := Pass(LOAD, 0, numbers, JOB_BLOCKS, 1), work.jobs())
        return {}

    def hit(self, start: int) -> dict[str, Any]:
        """Milliseconds from the arrival of a request to its loaded blocks, which are compared."""
        work = Pass(LOAD, start, JOB_BLOCKS, JOB_BLOCKS, 1)
        (job,) = work.jobs()
        self._content.spoil(work)
        seconds, hits = self._tiers.hit(job)
        if hits < JOB_BLOCKS:
            raise Refused(f"{JOB_BLOCKS - hits} of {JOB_BLOCKS} blocks are in no row")
        self._content.check(work)
        return {"ms": seconds * 1e3}

    # -- steps ---------------------------------------------------------------------------------------------------

    def message_bytes(self, numbers: int) -> dict[str, Any]:
        """The bytes of a lookup of so many keys, and of its answer."""
        look = wire.Look(1, wire.Keys.of(Job.of(range(numbers)).keys), True)  # type: ignore[arg-type]
        found = wire.Found(1, bytes(numbers), wire.Places(b"", b""))
        return {name: len(Codec.encode([item], 1)[0]) for name, item in (("asked", look), ("answered", found))}

    def steps(self, course: Course, keys: int, numbers: int) -> dict[str, Any]:
        """Seconds of the round trip of a lookup of so many keys, one in each step, of blocks that are stored."""
        stack, turn = self._tiers.stack, count()
        asked: list[list[OffloadKey]] = [
            Job.of(range(at, at + keys)).keys  # type: ignore[misc]
            for at in range(0, numbers - keys + 1, keys)
        ]

        def look() -> None:
            names = asked[next(turn) % len(asked)]
            while LookupResult.RETRY in (found := stack.lookup(names)):
                stack.wait(1.0)
                stack.step()
            if LookupResult.MISS in found:
                raise Refused(f"{found.count(LookupResult.MISS)} blocks are nowhere")

        return _in_steps(course, look, stack.step)

    def echo(self, course: Course, path: str, asked: int, answered: int) -> dict[str, Any]:
        """Seconds of the round trip of a message of so many bytes, one in each step."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.connect(path)
            message = bytes(asked)

            def ask() -> None:
                sock.send(message)
                if len(sock.recv(MESSAGE_BYTES_MAX)) != answered:
                    raise Refused("an answer of another length")

            return _in_steps(course, ask, lambda: None)

    # -- loads ---------------------------------------------------------------------------------------------------

    def load(self, seconds: float, a_second: float) -> dict[str, Any]:
        """Load all blocks in turn for so long, this many jobs a second; as fast as can be for 0.

        Returns GiB a second that came, those from the disk, and jobs. What came last is compared afterwards.
        """
        blocks, tiers = self._setup.blocks, self._tiers
        self._content.spoil(Pass(LOAD, 0, blocks, JOB_BLOCKS, AT_ONCE))
        before, begun = tiers.disk().loaded, time.perf_counter()
        moved = sum(count for _, count in tiers.run_jobs(self._paced(seconds, a_second), True, AT_ONCE))
        spent = time.perf_counter() - begun
        self._content.check(Pass(LOAD, 0, min(moved, blocks), JOB_BLOCKS, AT_ONCE))
        scale = self._setup.block_bytes / spent / GIB
        from_disk = (tiers.disk().loaded - before) * scale
        return {"gib_s": moved * scale, "disk_gib_s": from_disk, "jobs_a_second": moved / JOB_BLOCKS / spent}

    def _paced(self, seconds: float, a_second: float) -> Iterator[Job]:
        """Jobs when they are due; until then the engine steps."""
        begun, at = time.perf_counter(), 0
        for number in count():
            due = number / a_second if a_second else 0.0
            while (left := begun + due - time.perf_counter()) > 0:
                self._tiers.rest(left)
            if time.perf_counter() >= begun + seconds:
                return
            yield Job.of(range(at, at + JOB_BLOCKS))
            at = (at + JOB_BLOCKS) % self._setup.blocks


def _in_steps(course: Course, ask: Callable[[], None], step: Callable[[], object]) -> dict[str, Any]:
    """Seconds of a call that each step begins with."""
    seconds, every, offset = course
    begun, found = time.perf_counter() + offset, list[float]()
    for number in range(int(seconds / every)):
        while (left := begun + number * every - time.perf_counter()) > 0:
            time.sleep(left)
        asked = time.perf_counter()
        ask()
        found.append(time.perf_counter() - asked)
        step()
    return {"seconds": found}


if __name__ == "__main__":
    engine = EngineProcess()
    works = ("ready", "open", "close", "store", "hit", "message_bytes", "steps", "echo", "load")
    serve({name: getattr(engine, name) for name in works})

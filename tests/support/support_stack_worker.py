"""Processes of a tensor-parallel engine: a coordinator or a worker, as a JSON argument says.

One JSON request a line on stdin, one JSON reply a line on stdout. A worker serves the coordinator's copies meanwhile
and ends by itself when the coordinator hangs up.
"""

from __future__ import annotations

import asyncio
import json
import select
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from support_stack import Engine, keys, statuses, whole

from faults.machine import warm
from kvtier.config import build_tiers, parse_stack, stack_parts
from kvtier.stack import TierStack
from kvtier.stack.assembly import resolve_alignment
from kvtier.stack.workers.remote_worker import RemoteWorker, WorkerLinkOptions, serve_worker
from kvtier.tier.contract import TierContext
from kvtier.types.geometry import Geometry, GroupKind, GroupLayout, KVLayout, TensorRef
from kvtier.types.jobs import GPUGroup, JobKind
from kvtier.types.keys import CPU
from kvtier.types.namespace import Namespace

NUM_BLOCKS = 128
LAYOUT = KVLayout(
    (
        GroupLayout((TensorRef(0, 1000), TensorRef(1, 333))),
        GroupLayout((TensorRef(2, 2048),), kind=GroupKind.SLIDING_WINDOW, window_tokens=64),
    ),
    world_size=2,
    block_size_factor=2,
)

Blocks = Sequence[Sequence[int]]
"""(group, first key, keys, first GPU block) of each group of a job."""


def transfers(blocks: Blocks) -> list[GPUGroup]:
    return [whole(keys(count, group, start), gpu, LAYOUT.block_size_factor) for group, start, count, gpu in blocks]


class Process:
    """One such process, started. `call` waits for its reply, never for ever."""

    def __init__(self, role: dict[str, Any], sockets: Sequence[socket.socket]) -> None:
        self._out = b""
        fds = [sock.fileno() for sock in sockets]
        self.process = warm.Popen(
            [sys.executable, str(Path(__file__)), json.dumps(role | {"fds": fds})],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=fds,
            bufsize=0,
        )

    def ask(self, do: str, **request: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **request}).encode() + b"\n")

    def answer(self, timeout_seconds: float = 60.0) -> Any:
        assert self.process.stdout is not None
        until = time.monotonic() + timeout_seconds
        while b"\n" not in self._out:
            ready, _, _ = select.select([self.process.stdout], [], [], max(0.0, until - time.monotonic()))
            assert ready, "the process did not answer in time"
            piece = self.process.stdout.read(65536)
            assert piece, f"the process ended with {self.process.wait()} instead of answering"
            self._out += piece
        line, _, self._out = self._out.partition(b"\n")
        return json.loads(line)

    def call(self, do: str, **request: Any) -> Any:
        self.ask(do, **request)
        return self.answer()

    def wait(self, timeout_seconds: float = 60.0) -> int:
        """Wait for the end of the process; its exit status."""
        status = self.process.wait(timeout_seconds)
        self.shut()
        return status

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.shut()

    def shut(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


def start_worker(number: int, stack: str, engine_id: str) -> tuple[Process, socket.socket]:
    """A worker process and the coordinator's end of its socket, which is the only one left here."""
    ours, theirs = socket.socketpair()
    with theirs:
        role = {"role": "worker", "worker": number, "stack": stack, "engine_id": engine_id}
        return Process(role, [theirs]), ours


def parts_of(text: str, engine_id: str, socks: Sequence[socket.socket]):
    """The coordinator's side: no tensors, a link for each worker."""
    links = [RemoteWorker(WorkerLinkOptions(), sock) for sock in socks]
    return replace(stack_parts(parse_stack(text), Namespace(LAYOUT, model="tp"), workers=links), engine_id=engine_id)


async def requests() -> Any:
    """The lines of stdin, until its end."""
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        yield json.loads(line)


def reply(answer: Any) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


async def work(role: dict[str, Any]) -> None:
    number = role["worker"]
    engine = Engine(LAYOUT, NUM_BLOCKS, strided=True, worker=number)
    from kvtier_gpu import GPUBackend, GPUOptions  # brings torch, which the coordinator does without

    tiers = build_tiers(parse_stack(role["stack"]))
    cpu = next(tier for tier in tiers if tier.medium == CPU)
    gpu = GPUBackend(GPUOptions())
    geometry = Geometry(LAYOUT, await resolve_alignment(tiers))
    context = TierContext("gpu", geometry, Namespace(LAYOUT, model="tp"), time.monotonic, role["engine_id"], number)
    rows = await cpu.join(context)  # type: ignore[attr-defined]
    context = replace(context, kv_caches=engine.kv_caches, rows=rows)
    opened = await gpu.open(context)
    serving = asyncio.create_task(serve_worker(socket.socket(fileno=role["fds"][0]), gpu, context, opened))
    obeying = asyncio.create_task(obey(engine))
    await serving
    await gpu.close()
    await cpu.close()
    obeying.cancel()


async def obey(engine: Engine) -> None:
    async for request in requests():
        match request["do"]:
            case "compute":
                for one in transfers(request["blocks"]):
                    engine.compute(one)
                reply(None)
            case "wipe":
                engine.wipe()
                reply(None)
            case "wrong":
                before = Engine(LAYOUT, NUM_BLOCKS, strided=True).snapshot()
                groups = transfers(request["blocks"])
                wrong = [page for one in groups for page in engine.wrong(one)]
                reply({"wrong": wrong, "beside": not engine.untouched(before, groups)})


async def coordinate(role: dict[str, Any]) -> None:
    socks = [socket.socket(fileno=fd) for fd in role["fds"]]
    async with TierStack(parts_of(role["stack"], role["engine_id"], socks)) as stack:
        reply({"alignment": stack.geometry.alignment, "row_bytes": stack.geometry.row_bytes})
        async for request in requests():
            match request["do"]:
                case "store" | "load" as do:
                    job = stack.job(JobKind(do), transfers(request["blocks"]))
                    reply(statuses(await stack.run(job)))
                case "drain":
                    reply(await stack.drain(30))
                case "locate":
                    reply(stack.locate([key for one in transfers(request["blocks"]) for key in one.keys]))
        stack.check_integrity()
    assert stack.close_report is not None
    reply({"dropped": stack.close_report.dropped_blocks, "unfinished": stack.close_report.unfinished_jobs})


if __name__ == "__main__":
    told = json.loads(sys.argv[1])
    asyncio.run(work(told) if told["role"] == "worker" else coordinate(told))

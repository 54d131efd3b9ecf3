"""Four stacks with traffic, each with a fault that can be switched on and off, and an exporter of its metrics.

A process of its own, because it may change the machine: `stacks` starts and ends it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from support_paths import PROJECT
from support_stack import PAGE, PLAIN, Engine, fs, keys, load, opened, parts_of, stack_file, store, whole
from support_valkey import Server, stack_tier, valkey_server

from faults.machine.loops import ext4, frozen, without_loops
from faults.machine.undo import Machine
from kvtier.config.load import StackConfig
from kvtier.metrics.exporter import metrics_server
from kvtier.stack import StackParts, TierStack
from kvtier.testing import NO_FAULTS, Fault, FaultKind, FaultPlan, FaultyBackend, SeededFaults
from kvtier.types.geometry import GroupLayout, KVLayout, TensorRef

ROWS = 32
BATCH = 8
PAUSE_SECONDS = 0.1
LARGE_PAGE = 64 << 10
HELD = Fault(FaultKind.HOLD)
END_SECONDS = 120.0


@dataclass
class Host:
    """A stack whose requests go round over `names`: of each, what is there is loaded, the rest computed and stored.

    `fresh`: half of the blocks of each request are new.
    """

    stack: TierStack
    engine: Engine
    names: int
    fresh: bool = False

    async def serve(self) -> None:
        """Until cancelled. Every loaded byte is compared."""
        for number in count():
            some = keys(BATCH, start=number * BATCH % self.names)
            if self.fresh:
                some[BATCH // 2 :] = keys(BATCH // 2, start=number * BATCH, tag="fresh")
            await self.stack.lookup(some)
            loaded = await load(self.stack, self.engine, whole(some))
            lost = [key for key, outcome in zip(some, loaded.outcomes[0], strict=True) if not outcome.ok]
            if lost:
                await store(self.stack, self.engine, whole(lost))
            await asyncio.sleep(PAUSE_SECONDS)


@asynccontextmanager
async def serving(parts: StackParts, engine: Engine, names: int, fresh: bool = False) -> AsyncIterator[Host]:
    """A stack with traffic, which ends with the block."""
    async with opened(parts) as stack:
        host = Host(stack, engine, names, fresh)
        serving = asyncio.create_task(host.serve())
        try:
            yield host
        finally:
            serving.cancel()
            ended = await asyncio.gather(serving, return_exceptions=True)
            assert isinstance(ended[0], asyncio.CancelledError), ended


@dataclass
class Case:
    """A stack, and how its fault begins and ends. Both return at once."""

    host: Host
    begin: Callable[[], Any]
    end: Callable[[], Any]


def _parts(config: StackConfig, layout: KVLayout) -> tuple[StackParts, Engine]:
    engine = Engine(layout, BATCH)
    return parts_of(config, engine), engine


@asynccontextmanager
async def frozen_disk(root: Path, machine: Machine | None) -> AsyncIterator[Case]:
    """Nothing is written to the disk: a file system of its own is frozen. Where none can be made, the tier itself does
    not end what it is asked for."""
    if machine is None:
        parts, engine = _parts(stack_file(PLAIN, ROWS, fs(root)), PLAIN)
        tier = FaultyBackend(parts.tiers[-1])
        parts = dataclasses.replace(parts, tiers=[*parts.tiers[:-1], tier])
        async with serving(parts, engine, 2 * ROWS, fresh=True) as host:
            yield Case(host, partial(_hold, tier, SeededFaults(0, [(1.0, HELD)])), partial(_hold, tier, NO_FAULTS))
        return
    with ext4(machine, root) as disk:
        parts, engine = _parts(stack_file(PLAIN, ROWS, fs(disk.mount / "root")), PLAIN)
        with ExitStack() as freezing:
            async with serving(parts, engine, 2 * ROWS, fresh=True) as host:
                yield Case(host, lambda: freezing.enter_context(frozen(machine, disk)), freezing.close)


def _hold(tier: FaultyBackend, plan: FaultPlan) -> None:
    tier.plan = plan
    tier.release()


@asynccontextmanager
async def small_cpu_tier() -> AsyncIterator[Case]:
    """What requests come back to becomes more than the CPU tier holds; nothing is below it."""
    parts, engine = _parts(stack_file(PLAIN, ROWS), PLAIN)
    async with serving(parts, engine, ROWS // 2) as host:
        yield Case(host, partial(setattr, host, "names", 2 * ROWS), partial(setattr, host, "names", ROWS // 2))


@asynccontextmanager
async def evicting_server(server: Server) -> AsyncIterator[Case]:
    """The server gets less room than what it holds."""
    layout = KVLayout((GroupLayout((TensorRef(0, LARGE_PAGE),)),))
    parts, engine = _parts(stack_file(layout, ROWS, stack_tier(server)), layout)
    room = server.client.config_get("maxmemory")["maxmemory"]

    def shrink() -> None:
        used = server.client.info("memory")["used_memory"]
        server.client.config_set("maxmemory", used - ROWS * LARGE_PAGE)

    async with serving(parts, engine, 2 * ROWS) as host:
        yield Case(host, shrink, partial(server.client.config_set, "maxmemory", room))


@asynccontextmanager
async def corrupting_disk(root: Path) -> AsyncIterator[Case]:
    """The disk loses a byte of each page, again and again."""
    parts, engine = _parts(stack_file(PLAIN, ROWS, fs(root)), PLAIN)
    rot: list[asyncio.Task[None]] = []

    async def decay() -> None:
        while True:
            await asyncio.to_thread(spoil, root)
            await asyncio.sleep(PAUSE_SECONDS)

    async with serving(parts, engine, 2 * ROWS) as host:
        yield Case(host, lambda: rot.append(asyncio.create_task(decay())), lambda: rot.pop().cancel())


def spoil(root: Path) -> None:
    """Another value for a byte of each page of the slabs, once there is something in it."""
    for path in root.glob("slab-*"):
        with path.open("r+b", buffering=0) as slab:
            for at in range(PAGE // 2, path.stat().st_size, PAGE):
                if (held := os.pread(slab.fileno(), 1, at)) not in (b"", b"\0"):
                    os.pwrite(slab.fileno(), bytes([held[0] ^ 0x80 or 1]), at)


@asynccontextmanager
async def cases(folder: Path, machine: Machine | None) -> AsyncIterator[dict[str, Case]]:
    """A stack for each fault, with traffic."""
    async with AsyncExitStack() as several:
        server = several.enter_context(valkey_server())
        made = {
            "frozen_disk": frozen_disk(folder / "frozen", machine),
            "small_cpu_tier": small_cpu_tier(),
            "evicting_server": evicting_server(server),
            "corrupting_disk": corrupting_disk(folder / "corrupting"),
        }
        yield {name: await several.enter_async_context(case) for name, case in made.items()}


async def drive(folder: Path, machine: Machine | None) -> None:
    """Say the exporters' ports on a line, then begin and end the faults as the lines of stdin say, until it ends."""
    async with cases(folder, machine) as made:
        with ExitStack() as exporters:
            stats = {name: case.host.stack.stats for name, case in made.items()}
            print(json.dumps({name: exporters.enter_context(metrics_server(each, 0)) for name, each in stats.items()}))
            sys.stdout.flush()
            while word := (await asyncio.to_thread(sys.stdin.readline)).strip():
                for case in made.values():
                    (case.begin if word == "begin" else case.end)()
                print(word, flush=True)


class Stacks:
    """The process with the stacks. `ports` are those of the exporters, by the fault of each stack."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._log, self._commands, self._answers = log, process.stdin, process.stdout
        self.ports: dict[str, int] = json.loads(self._answer())

    def _answer(self) -> str:
        line = self._answers.readline()
        assert line, f"the stacks ended: {self._log.read_text()}"
        return line

    def say(self, word: str) -> None:
        """`begin` or `end` every fault; returns once that is done."""
        print(word, file=self._commands, flush=True)
        assert self._answer() == f"{word}\n"


@contextmanager
def stacks(folder: Path) -> Iterator[Stacks]:
    """The stacks, in a process of their own until the end of the block. They must end well."""
    path = os.pathsep.join(filter(None, (str(PROJECT), os.environ.get("PYTHONPATH"))))
    command, environment = [sys.executable, "-W", "error", __file__, str(folder)], os.environ | {"PYTHONPATH": path}
    pipe, log = subprocess.PIPE, folder / "stacks.log"
    with (
        log.open("w") as stderr,
        subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=stderr, text=True, env=environment) as process,
    ):
        try:
            yield Stacks(process, log)
            assert process.stdin is not None
            process.stdin.close()
            assert process.wait(END_SECONDS) == 0, log.read_text()
        finally:
            process.kill()


def main(folder: str) -> None:
    """The process of the stacks."""
    if without_loops() is not None:
        asyncio.run(drive(Path(folder), None))
        return
    with Machine() as machine:
        asyncio.run(drive(Path(folder), machine))


if __name__ == "__main__":
    main(*sys.argv[1:])

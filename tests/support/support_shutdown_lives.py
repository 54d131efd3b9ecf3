"""Lives of processes with open stacks: `python support_shutdown_lives.py LIFE ROOT IO_ENGINE HOW`."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

from support_stack import Engine, fs, keys, parts_of, stack_file, until, whole

from kvtier.client.private import PrivateStack
from kvtier.config import StackConfig
from kvtier.engines.process_stack import ProcessStack
from kvtier.stack import StackParts, TierStack
from kvtier.types.geometry import GroupLayout, KVLayout, TensorRef
from kvtier.types.jobs import JobKind
from kvtier.types.keys import OffloadKey

LAYOUT = KVLayout((GroupLayout((TensorRef(0, 64 << 10),)),))
BLOCKS = 96
BATCH = 16
NAMES = keys(BLOCKS, tag="life")


def cache() -> Engine:
    """An engine whose first BLOCKS GPU blocks hold what NAMES say."""
    engine = Engine(LAYOUT, 2 * BLOCKS)
    engine.compute(whole(NAMES))
    return engine


def parts(engine: Engine, root: str, io_engine: str, **settings: float) -> StackParts:
    """A stack whose every block goes to disk, through one I/O engine."""
    return parts_of(config(root, io_engine), engine, **settings)


def config(root: str, io_engine: str) -> StackConfig:
    return stack_file(LAYOUT, BLOCKS, fs(Path(root), capacity=32 << 20, io_engine=io_engine))


def runtime_of(root: str) -> str:
    """The folder for the socket of a stack process over a root, whose own path may be too long for one."""
    return f"{tempfile.gettempdir()}/kvt-{hashlib.sha256(root.encode()).hexdigest()[:12]}"


def process_stack(engine: Engine, root: str, io_engine: str) -> ProcessStack:
    """The same stack in a process of its own."""
    text = config(root, io_engine).model_dump_json(exclude_unset=True)
    os.makedirs(runtime_of(root), exist_ok=True)
    return ProcessStack(parts(engine, root, io_engine), lambda: PrivateStack(text, runtime_of(root)))


def batches() -> list[tuple[int, list[OffloadKey]]]:
    return [(start, NAMES[start : start + BATCH]) for start in range(0, BLOCKS, BATCH)]


def under_way(stack: Any) -> int:
    return stack._assembled.dispatcher.running


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def busy_engine_stack(root: str, io_engine: str) -> ProcessStack:
    """Open, with stores of every block submitted and the first on their way."""
    stack = process_stack(cache(), root, io_engine)
    stack.open()
    for start, names in batches():
        stack.submit(stack.job(JobKind.STORE, [whole(names, start)]))
    stack.step()
    return stack


async def busy_tier_stack(root: str, io_engine: str) -> tuple[TierStack, list[asyncio.Task[Any]]]:
    """Open, with stores of every block begun, and loads of them behind; the tasks are returned."""
    stack = TierStack(parts(cache(), root, io_engine))
    await stack.open()
    tasks = [
        asyncio.create_task(stack.run(stack.job(JobKind.STORE, [whole(names, start)]))) for start, names in batches()
    ]
    await tasks[0]
    tasks += [
        asyncio.create_task(stack.run(stack.job(JobKind.LOAD, [whole(names, BLOCKS + start)])))
        for start, names in batches()
    ]
    await asyncio.sleep(0)
    return stack, tasks


def leave(how: str) -> None:
    """End as programs do."""
    if how == "exit":
        sys.exit(3)
    if how == "raise":
        raise ValueError("ours")


# -- lives: functions of (root, io_engine, how) that end however they end ---------------------------------------


def engine_unclosed(root: str, io_engine: str, how: str) -> None:
    globals()["kept"] = stack = busy_engine_stack(root, io_engine)
    say(running=stack.has_pending_work)
    leave(how)


def engine_closed(root: str, io_engine: str, how: str) -> None:
    stack = busy_engine_stack(root, io_engine)
    try:
        say(running=stack.has_pending_work)
        leave(how)
    finally:
        stack.close()


def tier_unclosed(root: str, io_engine: str, how: str) -> None:
    async def main() -> None:
        globals()["kept"] = stack, _ = await busy_tier_stack(root, io_engine)
        say(running=under_way(stack))
        leave(how)

    asyncio.run(main())


def tier_closed(root: str, io_engine: str, how: str) -> None:
    async def main() -> None:
        stack, _ = await busy_tier_stack(root, io_engine)
        try:
            say(running=under_way(stack))
            leave(how)
        finally:
            await stack.close()

    asyncio.run(main())


def loop_closed(root: str, io_engine: str, how: str) -> None:
    """The loop goes away under jobs that are under way, tasks, timers and all."""
    loop = asyncio.new_event_loop()
    stack, _ = loop.run_until_complete(busy_tier_stack(root, io_engine))
    say(running=under_way(stack))
    loop.close()
    leave(how)


def forked(root: str, io_engine: str, how: str) -> None:
    """Forks children that end as real programs do, each its way, through this program's own with block; goes on."""
    engine = cache()
    one, other = whole(NAMES), whole(NAMES, BLOCKS)
    with process_stack(engine, root, io_engine) as stack:
        results = []
        for kind, group, way in (
            (JobKind.STORE, one, "end"),
            (JobKind.LOAD, other, "exit"),
            (JobKind.LOAD, other, "raise"),
        ):
            stack.submit(stack.job(kind, [group]))
            stack.step()
            with warnings.catch_warnings():  # from Python 3.12 on: a fork beside threads, which is what is tried here
                warnings.simplefilter("ignore", DeprecationWarning)
                child = os.fork()
            if not child:
                leave(way)
                return
            _, status = os.waitpid(child, 0)
            while not (ended := stack.step()):
                stack.wait(30.0)
            right = sum(one.ok for one in ended[0].outcomes[0])
            results.append([os.waitstatus_to_exitcode(status), right, len(engine.wrong(group, ended[0].outcomes[0]))])
    say(results=results, unfinished=stack.close_report.unfinished_jobs)


def waiting_child() -> int:
    """Fork a child that waits for signals, and return once it can take one.

    Python forgets the signals that reach a child before it has set itself up after the fork, and `signal.pause` sleeps
    on after one that came just before it.
    """
    ready, tell = os.pipe()
    child = os.fork()
    if not child:
        os.write(tell, b"1")
        while True:
            time.sleep(0.05)
    os.read(ready, 1)
    return child


def signalled(root: str, io_engine: str, how: str) -> None:
    """Waits for a signal that closes its stack; `how` is what was there before: default, ignore, handler or child.

    `child`: default, and a forked child that waits for the same signal.
    """

    async def main() -> None:
        stack, tasks = await busy_tier_stack(root, io_engine)
        heard = asyncio.Event()
        before = {"ignore": signal.SIG_IGN, "handler": lambda *_: heard.set()}.get(how, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, before)
        stack.close_on(signal.SIGTERM)
        child = waiting_child() if how == "child" else 0
        say(pid=os.getpid(), child=child, tasks=len(tasks))
        if how == "ignore":
            await until(lambda: stack.close_report is not None)
        else:
            await heard.wait()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        given_back = signal.getsignal(signal.SIGTERM) == before
        say(dropped=stack.close_report.dropped_blocks, results=len(results), given_back=given_back)

    asyncio.run(main())


def interrupted(root: str, io_engine: str, how: str) -> None:
    """Ctrl-C while loads go on without end."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts in the background ignores it
    names = batches()

    async def main() -> None:
        async with TierStack(parts(cache(), root, io_engine)) as stack:
            for start, some in names:
                await stack.run(stack.job(JobKind.STORE, [whole(some, start)]))
            say(pid=os.getpid())
            while True:
                for start, some in names:
                    await stack.run(stack.job(JobKind.LOAD, [whole(some, BLOCKS + start)]))

    def engine_main() -> None:
        with process_stack(cache(), root, io_engine) as stack:
            for start, some in names:
                stack.submit(stack.job(JobKind.STORE, [whole(some, start)]))
            say(pid=os.getpid())
            while True:
                for start, some in names:
                    stack.submit(stack.job(JobKind.LOAD, [whole(some, BLOCKS + start)]))
                ended = 0
                while ended < len(names):
                    ended += len(stack.step())
                    stack.wait(0.1)

    engine_main() if how == "engine" else asyncio.run(main())


LIVES = {
    life.__name__: life
    for life in (
        engine_unclosed,
        engine_closed,
        tier_unclosed,
        tier_closed,
        loop_closed,
        forked,
        signalled,
        interrupted,
    )
}


if __name__ == "__main__":
    life, *arguments = sys.argv[1:]
    LIVES[life](*arguments)

"""The life of a stack process: it serves until a signal comes, or, a private one, until its engines are gone."""

from __future__ import annotations

import asyncio
import signal

from kvtier.config import parse_stack, stack_parts
from kvtier.config.load import StackConfig
from kvtier.service.server import StackServer


def serve(stack: str, path: str, linger_seconds: float | None = None) -> None:
    """Serve the stack that a YAML text describes on a socket, until SIGTERM or SIGINT.

    With `linger_seconds` it also ends so long after the last engine has gone, or when none has come by then. Raises
    ConfigError, ResourceError.
    """
    asyncio.run(_serve(parse_stack(stack), path, linger_seconds))


async def _serve(config: StackConfig, path: str, linger_seconds: float | None) -> None:
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)
    async with StackServer(lambda namespace: stack_parts(config, namespace), path) as server:
        waits: list[asyncio.Task[object]] = [loop.create_task(ended.wait())]
        if linger_seconds is not None:
            waits.append(loop.create_task(server.wait_idle(linger_seconds)))
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for task in waits:
            task.cancel()

"""The life of a stack process: it serves until a signal comes, or, a private one, until its engines are gone."""

from __future__ import annotations

import asyncio
import logging
import signal

from kvtier.config import parse_stack, stack_parts
from kvtier.config.load import StackConfig
from kvtier.service.server import StackServer
from kvtier.stack.signals import ClosingSignals

_log = logging.getLogger(__name__)


def serve(stack: str, path: str, linger_seconds: float | None = None) -> None:
    """Serve the stack that a YAML text describes on a socket, until SIGTERM or SIGINT, which then take their course.

    With `linger_seconds` it also ends so long after the last engine has gone, or when none has come by then. Raises
    ConfigError, ResourceError.
    """
    asyncio.run(_serve(parse_stack(stack), path, linger_seconds))


async def _serve(config: StackConfig, path: str, linger_seconds: float | None) -> None:
    async with StackServer(lambda namespace: stack_parts(config, namespace), path) as server:
        ClosingSignals(asyncio.get_running_loop(), server.close).install((signal.SIGTERM, signal.SIGINT))
        _log.info("the stack is served at %s", path)
        if linger_seconds is None:
            await asyncio.get_running_loop().create_future()
        else:
            await server.wait_idle(linger_seconds)

"""The life of a stack process: it serves until a signal comes, or, a private one, until its engines are gone."""

from __future__ import annotations

import asyncio
import logging
import resource
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager, closing, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvtier.aio.process_lock import locked_file
from kvtier.config import parse_stack, stack_parts
from kvtier.config.access import UserAccess
from kvtier.config.load import StackConfig
from kvtier.service.channel import start_lock
from kvtier.service.crash_file import CrashFile
from kvtier.service.earlier_ranks import adopt_ranks
from kvtier.service.kept_memory import KeptMemory
from kvtier.service.queued_log import flush_logs
from kvtier.service.server import StackServer
from kvtier.service.service_manager import ServiceManager
from kvtier.stack.signals import ClosingSignals
from kvtier.stack.watching.stats import StackStats

PREDECESSOR_SECONDS = 45.0
"""How long a private process waits until an earlier one at its path has written back; its roots are free then."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PrivateLife:
    """A process that ends by itself with its last engine that leaves, or so long after its last connection.

    `on_listening` is called once it listens.
    """

    linger_seconds: float
    on_listening: Callable[[], None]


Watch = Callable[[Callable[[], StackStats]], AbstractContextManager[object]]
"""What shows figures of a stack, by the call for them, while it is served."""


def serve(stack: str, path: str, private: PrivateLife | None = None, watch: Watch = nullcontext) -> None:
    """Serve the stack that a YAML text describes on a socket, until SIGTERM or SIGINT, which then take their course.

    Raises ConfigError, ResourceError.
    """
    _raise_descriptor_limit()
    asyncio.run(_serve(parse_stack(stack), path, private, watch))


def _raise_descriptor_limit() -> None:
    """Allow as many descriptors as may be had: the first limit is often 1,024, for programs with select(2)."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


async def _serve(config: StackConfig, path: str, private: PrivateLife | None, watch: Watch) -> None:
    patience = PREDECESSOR_SECONDS if private is not None else 0.0
    manager = ServiceManager() if private is None else None
    kept = KeptMemory(manager) if manager is not None and manager.is_there else None
    access = UserAccess(config.allow, config.group) if private is None else None
    server = StackServer(lambda namespace: stack_parts(config, namespace), path, patience, kept, access)
    with watch(server.stats), closing(manager) if manager is not None else nullcontext():
        async with server:
            if private is not None:  # the process before at this path uses none of them any more
                config = adopt_ranks(config, _log.warning)
            ClosingSignals(asyncio.get_running_loop(), partial(_close, server)).install((signal.SIGTERM, signal.SIGINT))
            server.crash = crash = CrashFile(path)
            asyncio.get_running_loop().set_exception_handler(partial(_on_exception, crash))
            _log.info("the stack is served at %s", path)
            server.audits_rows = private is None
            if manager is not None:
                manager.notify("READY=1")
                await manager.watch()
            elif private is not None:
                server.ends_with_engines = True
                private.on_listening()
                await _linger(server, path, private.linger_seconds)


async def _close(server: StackServer) -> None:
    """Close before a signal ends the process, which then writes no more."""
    try:
        await server.close()
    finally:
        flush_logs()


def _on_exception(crash: CrashFile, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """End the process for an exception of a callback of the loop; one of a task is a line in the log."""
    error = context.get("exception")
    if error is not None and "handle" in context:
        crash.exit(error)
    loop.default_exception_handler(context)


async def _linger(server: StackServer, path: str, seconds: float) -> None:
    """Return when there was no connection for so long, or when the last engine leaves, with the socket gone.

    That is decided behind the lock of those who start a process: who has found this one in time is served.
    """
    while True:
        await server.wait_idle(seconds)
        try:
            with locked_file(start_lock(path)):
                if server.withdraw_if_idle():
                    return
        except TimeoutError:  # a process looks for this one just now
            continue
        except OSError as error:  # such as a folder that is gone: no process will find this one
            _log.warning("the socket %s is given up: %s", path, error)
            return

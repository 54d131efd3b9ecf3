"""Which I/O engine serves a root."""

import asyncio
from collections.abc import Callable

from kvtier.aio.daemon_pool import DaemonPool
from kvtier.aio.loop_budget import TimeBudget
from kvtier.errors import ResourceError
from kvtier_fs.io.contract import IOEngine
from kvtier_fs.io.threads import ThreadsEngine
from kvtier_fs.io.uring import UringEngine, probe_uring
from kvtier_fs.options import RootOptions


def choose_engine(options: RootOptions) -> tuple[str, str]:
    """The name of the I/O engine, and a note if it is not the preferred one. Blocks.

    Raises ResourceError if the options require io_uring and it is not available.
    """
    reason = probe_uring() if options.io_engine != "threads" else ""
    if reason and options.io_engine == "io_uring":
        raise ResourceError(f"io_engine is io_uring but {reason}; choose auto or threads")
    name = "threads" if reason or options.io_engine == "threads" else "io_uring"
    return name, f"{reason}; threads serve instead" if reason else ""


def make_engine(
    name: str,
    threads: DaemonPool,
    options: RootOptions,
    hold: Callable[[IOEngine], object],
    budget: TimeBudget | None = None,
) -> IOEngine:
    """An engine of the chosen kind for one root; threads if the ring cannot be made and io_uring is not required.

    `hold` is called with it before it is opened, so that its owner can close it in any case. Raises ResourceError.
    """
    loop = asyncio.get_running_loop()
    if name == "io_uring":
        ring = UringEngine(loop, options.io_depth, budget)
        hold(ring)
        try:
            ring.open()
        except ResourceError:
            if options.io_engine == "io_uring":
                raise
        else:
            return ring
    engine = ThreadsEngine(loop, threads, options.io_threads, budget)
    hold(engine)
    engine.open()
    return engine


def mode(layout: str, engine: str, direct: bool) -> str:
    """A tier's way of I/O, in words."""
    return f"{layout}, {engine}, {'direct' if direct else 'buffered'}"

"""Waiting that cancellation cannot cut short: for buffers that are in use until an operation has really ended."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

T = TypeVar("T")


async def shielded_wait(work: Awaitable[T], on_cancel: Callable[[], object] | None = None) -> T:
    """The result of a future or a coroutine; a cancellation of the caller is raised only after it is done.

    Buffers of a copy or a thread are in use until it ends; cancelling never hands them back early.
    `on_cancel` is called at the first cancellation, for example to end the operation early.
    """
    future = asyncio.ensure_future(work)
    try:
        return future.result() if future.done() else await asyncio.shield(future)
    except asyncio.CancelledError as error:
        if future.cancelled():
            raise
        if on_cancel is not None:
            on_cancel()
        cancelled = await wait_done(future) or error
        if not future.cancelled():
            future.exception()  # retrieved here; the cancellation goes first
        raise cancelled from None


async def wait_done(future: asyncio.Future[Any], timeout_seconds: float | None = None) -> asyncio.CancelledError | None:
    """Wait until the future is done or the time is over, also when cancelled. Returns the last cancellation, if any."""
    loop = asyncio.get_running_loop()
    deadline = None if timeout_seconds is None else loop.time() + timeout_seconds
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        left = None if deadline is None else deadline - loop.time()
        if left is not None and left <= 0:
            break
        try:
            await asyncio.wait((future,), timeout=left)
        except asyncio.CancelledError as error:
            cancelled = error
    return cancelled

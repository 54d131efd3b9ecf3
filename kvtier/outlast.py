"""Waiting that cancellation cannot cut short: for buffers that are in use until an operation has really ended."""

from __future__ import annotations

import asyncio
from typing import TypeVar

T = TypeVar("T")


async def outlast(future: asyncio.Future[T]) -> T:
    """The future's result; a cancellation of the caller is raised only after the future is done."""
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait((future,))
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not future.cancelled():
            future.exception()  # seen here; the cancellation goes first
        raise cancelled
    return future.result()

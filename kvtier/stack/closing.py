"""Closing a stack: drain within a deadline, then give up the rest and say what that was."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtier.loadstore import LoadStore

if TYPE_CHECKING:
    from kvtier.stack.assembly import Assembled

logger = logging.getLogger(__name__)

UNCLOSED = "{!r}: its threads, files and locks stay until the process ends; close it, or use it in a with block"


@dataclass(frozen=True, slots=True)
class CloseReport:
    """What closing cost: blocks that did not reach a lower tier they were owed to, and jobs that had not ended."""

    dropped_blocks: int
    unfinished_jobs: int


async def close_each(tiers: Iterable[LoadStore], timeout_seconds: float) -> None:
    """Close tiers one after another, each within a deadline, whatever one of them does.

    What raises or does not return is logged. Goes on to the last tier when cancelled; the cancellation follows then.
    """
    cancelled: asyncio.CancelledError | None = None
    for tier in tiers:
        name = tier.options.name or tier.options.type
        closing = asyncio.ensure_future(tier.close())
        deadline = asyncio.get_running_loop().time() + timeout_seconds
        while not closing.done() and (left := deadline - asyncio.get_running_loop().time()) > 0:
            try:
                await asyncio.wait((closing,), timeout=left)
            except asyncio.CancelledError as error:
                cancelled = error
        if not closing.done():
            logger.warning("tier %s did not close within %g s and is left behind", name, timeout_seconds)
        elif not closing.cancelled() and (failure := closing.exception()) is not None:
            logger.error("tier %s could not be closed", name, exc_info=failure)
    if cancelled is not None:
        raise cancelled


@dataclass(frozen=True, slots=True)
class Abandoned:
    """What was owed to lower tiers when draining ended: given up, or under way and perhaps stored yet."""

    given_up: int
    under_way: int
    stored_before: int


def abandon(assembled: Assembled) -> Abandoned:
    """Give up what is owed to lower tiers and not under way. Call where the control plane lives."""
    given_up = assembled.plane.abandon()
    return Abandoned(given_up, assembled.plane.under_way, _stored(assembled))


async def end_tiers(assembled: Assembled, timeout_seconds: float) -> None:
    """Start no job any more and close every tier, lower ones first. Call in the loop."""
    assembled.dispatcher.stop()
    await close_each(reversed(assembled.to_close), timeout_seconds)
    await asyncio.sleep(0)  # what has ended is told in the next turn of the loop


def report(assembled: Assembled, abandoned: Abandoned) -> CloseReport:
    """What closing cost, once all that ended has been told to the control plane."""
    stored = _stored(assembled) - abandoned.stored_before
    result = CloseReport(abandoned.given_up + abandoned.under_way - stored, assembled.dispatcher.running)
    if result.dropped_blocks or result.unfinished_jobs:
        logger.warning(
            "closed with %d blocks not stored in lower tiers and %d jobs not ended",
            result.dropped_blocks,
            result.unfinished_jobs,
        )
    return result


def _stored(assembled: Assembled) -> int:
    return sum(assembled.plane.counters(position).stored for position in range(1, len(assembled.lanes)))

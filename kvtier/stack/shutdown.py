"""Closing a stack: drain within a deadline, then give up the rest and say what that was."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtier.aio.shielded_wait import wait_done
from kvtier.tier.contract import LoadStore

if TYPE_CHECKING:
    from kvtier.stack.open_stack import OpenStack

logger = logging.getLogger(__name__)

UNCLOSED = "{!r}: its threads, files and locks stay until the process ends; close it, or use it in a with block"

TRIES = 2


@dataclass(frozen=True, slots=True)
class CloseReport:
    """Losses of a closing: dirty blocks that did not reach a lower tier, and jobs that had not ended."""

    dropped_blocks: int
    unfinished_jobs: int


async def close_each(tiers: Iterable[LoadStore], timeout_seconds: float) -> None:
    """Close tiers one after another, each within a deadline, whatever one of them does.

    What raises is logged and tried once more, what does not return is logged. Goes on to the last tier when cancelled;
    the cancellation follows then.
    """
    cancelled: asyncio.CancelledError | None = None
    for tier in tiers:
        for _ in range(TRIES):
            try:
                closing = asyncio.ensure_future(tier.close())
                cancelled = await wait_done(closing, timeout_seconds) or cancelled
                if closing.done() and not closing.cancelled():
                    closing.result()
            except Exception:
                logger.exception("tier %s could not be closed", tier.options.label)
                continue
            if not closing.done():
                logger.warning(
                    "tier %s did not close within %g s and is left behind", tier.options.label, timeout_seconds
                )
            break
    if cancelled is not None:
        raise cancelled


@dataclass(frozen=True, slots=True)
class Abandoned:
    """Blocks that lower tiers had not stored when draining ended: given up, or in flight and perhaps stored yet."""

    given_up: int
    in_flight: int
    stored_before: int


def abandon(assembled: OpenStack) -> Abandoned:
    """Give up the dirty blocks that are not in flight. Call in the thread of the control plane."""
    given_up = assembled.plane.abandon()
    if assembled.models is not None and assembled.plane.uses is not None:
        assembled.models.save(last=True)
    return Abandoned(given_up, assembled.plane.in_flight, _stored(assembled))


async def end_tiers(assembled: OpenStack, timeout_seconds: float) -> None:
    """Start no job any more and close every tier, lower ones first. Call in the loop."""
    joining, recorder, cancelled = assembled.joining, assembled.recorder, None
    try:
        assembled.dispatcher.stop()
    finally:
        if assembled.stats_socket is not None:
            cancelled = await assembled.stats_socket.close()
        if joining is not None:
            cancelled = await joining.end(timeout_seconds) or cancelled
        if assembled.models is not None:
            closing = asyncio.ensure_future(assembled.models.close(timeout_seconds))
            cancelled = await wait_done(closing, timeout_seconds) or cancelled
        try:
            await close_each(reversed(assembled.to_close), timeout_seconds)
        finally:  # cancelled, it raises once all are closed
            if recorder is not None:
                cancelled = await recorder.close() or cancelled
    if cancelled is not None:
        raise cancelled
    await asyncio.sleep(0)  # what has ended is delivered in the next iteration of the loop


def report(assembled: OpenStack, abandoned: Abandoned) -> CloseReport:
    """Report the losses of a closing, once the control plane has recorded all that ended; nothing is delivered then."""
    assembled.dispatcher.detach()
    stored = _stored(assembled) - abandoned.stored_before
    return CloseReport(abandoned.given_up + abandoned.in_flight - stored, assembled.dispatcher.running)


def _stored(assembled: OpenStack) -> int:
    counters = assembled.plane.control.counters
    return sum(counters(position).stored for position in range(1, len(assembled.dispatcher.queues)))

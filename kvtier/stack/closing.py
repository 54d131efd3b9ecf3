"""Closing a stack: drain within a deadline, then give up the rest and say what that was."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from kvtier.stack.assembly import Assembled

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CloseReport:
    """What closing cost: blocks that did not reach a lower tier, and jobs that had not ended at the deadline."""

    dropped_blocks: int
    unfinished_jobs: int


async def close_tiers(assembled: Assembled, dropped_blocks: int) -> CloseReport:
    """Close every tier, lower ones first, and report. Jobs still under way belong to tiers that report stuck I/O."""
    for tier in reversed(assembled.to_close):
        await tier.close()
    await asyncio.sleep(0)
    report = CloseReport(dropped_blocks, assembled.dispatcher.running)
    if report.dropped_blocks or report.unfinished_jobs:
        logger.warning(
            "closed with %d blocks not stored in lower tiers and %d jobs not ended",
            report.dropped_blocks,
            report.unfinished_jobs,
        )
    return report

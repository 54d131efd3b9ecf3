"""Blocks that another host has stored are not written again: a lookup for a whole job, where that costs less."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import replace
from itertools import chain

from kvtier.errors import IntegrityError
from kvtier.tier.contract import AnswersLookups, LoadStore, LookupResult
from kvtier.types.jobs import PRESENT, JobResult, RowGroup, TransferJob
from kvtier.types.keys import OffloadKey

logger = logging.getLogger(__name__)


async def store_absent(tier: LoadStore, job: TransferJob) -> JobResult:
    """Store the blocks of a job that a shared tier does not hold; those that it holds are PRESENT.

    Where the lookup says nothing, as when a server does not answer, everything is stored.
    """
    held = await _held(tier, job)
    if not held:
        return await tier.store(job)
    groups = [_without(group, held) for group in job.row_groups]
    rest = replace(job, groups=tuple(group for group in groups if group.keys))
    stored = await tier.store(rest) if rest.groups else JobResult(job.job_id, ())
    if not stored.fits(rest):
        raise IntegrityError("the result does not have one outcome for each block")
    each = chain.from_iterable(stored.outcomes)
    outcomes = [tuple([PRESENT if key in held else next(each) for key in group.keys]) for group in job.row_groups]
    return JobResult(job.job_id, tuple(outcomes), stored.bytes_moved, stored.seconds)


async def _held(tier: LoadStore, job: TransferJob) -> set[OffloadKey]:
    """The keys of the job that the tier has."""
    assert isinstance(tier, AnswersLookups)
    keys = [key for group in job.groups for key in group.keys]
    try:
        answers = zip(keys, await tier.lookup(keys), strict=True)
        return {key for key, answer in answers if answer is LookupResult.HIT}
    except Exception:  # at the border to a tier, which may be anyone's
        logger.exception("tier %s could not answer a lookup", tier.options.label)
        return set()


def _without(group: RowGroup, held: Collection[OffloadKey]) -> RowGroup:
    """A group of a shared tier's job, without the keys that are there."""
    left = [(key, row) for key, row in zip(group.keys, group.rows, strict=True) if key not in held]
    return RowGroup(group.group, tuple(key for key, _ in left), [row for _, row in left])

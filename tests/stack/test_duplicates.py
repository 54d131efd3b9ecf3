"""Blocks that a shared tier has are left out of a store; every block of the job still has its outcome."""

from __future__ import annotations

import errno
from collections.abc import Sequence

import pytest

from kvtier.errors import IntegrityError
from kvtier.options import TierOptions
from kvtier.stack.dispatcher import store_absent
from kvtier.tier.contract import LoadStore, LookupResult, Opened, TierContext
from kvtier.types.jobs import PRESENT, STORED, JobKind, JobResult, RowGroup, TransferJob, failed
from kvtier.types.keys import GroupIndex, JobId, OffloadKey, make_key

KEYS = [make_key(bytes([number]) * 16, number % 2) for number in range(6)]


class Shared(LoadStore):
    """Holds some keys, fails to store one, and records what it was asked and sent."""

    Options = TierOptions

    def __init__(self, held: Sequence[OffloadKey] = (), broken: OffloadKey | None = None) -> None:
        super().__init__(TierOptions(type="shared"))
        self.held, self.broken = held, broken
        self.asked: list[list[OffloadKey]] = []
        self.sent: list[tuple[int, tuple[OffloadKey, ...], list[int]]] = []

    async def open(self, context: TierContext) -> Opened:
        return Opened(0)

    async def lookup(self, keys: Sequence[OffloadKey]) -> Sequence[LookupResult]:
        self.asked.append(list(keys))
        return [LookupResult.HIT if key in self.held else LookupResult.MISS for key in keys]

    async def store(self, job: TransferJob) -> JobResult:
        self.sent += [(group.group, group.keys, list(group.rows)) for group in job.row_groups]
        outcomes = [[failed(errno.EIO) if key == self.broken else STORED for key in group.keys] for group in job.groups]
        return JobResult(job.job_id, tuple(map(tuple, outcomes)), 100 * sum(map(len, outcomes)), 0.5)

    async def load(self, job: TransferJob) -> JobResult:
        raise NotImplementedError

    async def close(self) -> None:
        pass


def job() -> TransferJob:
    """Keys of two groups, with rows 10 times their number."""
    groups = []
    for group in (0, 1):
        numbers = range(group, 6, 2)
        keys = tuple(KEYS[number] for number in numbers)
        groups.append(RowGroup(GroupIndex(group), keys, [10 * number for number in numbers]))
    return TransferJob(JobId(7), JobKind.STORE, tuple(groups), 9.0, 3)


async def test_only_what_is_absent_is_sent_and_each_block_has_its_own_outcome():
    tier = Shared(held=[KEYS[0], KEYS[3]], broken=KEYS[4])
    result = await store_absent(tier, job())
    assert tier.asked == [[KEYS[n] for n in (0, 2, 4, 1, 3, 5)]], "one lookup for the job"
    assert tier.sent == [(0, (KEYS[2], KEYS[4]), [20, 40]), (1, (KEYS[1], KEYS[5]), [10, 50])]
    assert result.outcomes == ((PRESENT, STORED, failed(errno.EIO)), (STORED, PRESENT, STORED))
    assert (result.job_id, result.bytes_moved, result.seconds) == (7, 400, 0.5)


async def test_a_group_that_is_all_there_is_left_out():
    tier = Shared(held=KEYS[0::2])
    result = await store_absent(tier, job())
    assert [group for group, _, _ in tier.sent] == [1]
    assert result.outcomes == ((PRESENT,) * 3, (STORED,) * 3)


async def test_nothing_is_sent_if_all_is_there():
    tier = Shared(held=KEYS)
    result = await store_absent(tier, job())
    assert (tier.sent, result.bytes_moved) == ([], 0)
    assert result.outcomes == ((PRESENT,) * 3, (PRESENT,) * 3)


@pytest.mark.parametrize("answer", ["raises", "too few", "retry"])
async def test_a_lookup_that_says_nothing_keeps_no_block_from_being_stored(answer):
    class Silent(Shared):
        async def lookup(self, keys: Sequence[OffloadKey]) -> Sequence[LookupResult]:
            if answer == "raises":
                raise OSError(errno.ETIMEDOUT, "no answer")
            return [LookupResult.RETRY] * (len(keys) - (answer == "too few"))

    tier = Silent(held=KEYS)
    result = await store_absent(tier, job())
    assert len(tier.sent) == 2
    assert result.ok


async def test_a_result_that_does_not_fit_is_refused():
    class Short(Shared):
        async def store(self, job: TransferJob) -> JobResult:
            return JobResult(job.job_id, ((STORED,),))

    with pytest.raises(IntegrityError, match="one outcome for each block"):
        await store_absent(Short(held=KEYS[:1]), job())

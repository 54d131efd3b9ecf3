"""Jobs that did not end by their deadline: when they count as lost, and the stack with them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvtier.errors import IntegrityError
from kvtier.stack.core import GRACE_SECONDS, StackCore


@pytest.fixture
def stack():
    """What a look for overdue jobs reads: jobs by deadline, the copies under way, and what it failed with."""
    copies: set[int] = set()
    core = SimpleNamespace(_jobs={}, _overdue=set(), _copies_then=set(), _overdue_at=0.0, _failed=False, errors=[])
    core._assembled = SimpleNamespace(dispatcher=SimpleNamespace(copies=lambda: set(copies)), plane=object())

    def look(now: float, jobs: set[int], under_way: set[int]) -> int:
        core._jobs = {number: SimpleNamespace(deadline=float(number)) for number in jobs}
        copies.clear()
        copies.update(under_way)
        try:
            StackCore._look_for_overdue(core, now)
        except IntegrityError as error:
            core.errors.append(error)
        return len(core.errors)

    core.look = look
    return core


def test_a_job_in_time_is_left_alone(stack):
    assert stack.look(5.0, {8, 6}, set()) == 0
    assert stack._overdue_at == 6 + GRACE_SECONDS


def test_a_job_that_waits_for_no_copy_is_lost_at_the_second_look(stack):
    now = 8 + GRACE_SECONDS
    assert stack.look(now, {8}, set()) == 0
    assert stack._overdue_at == now + GRACE_SECONDS
    assert stack.look(now + GRACE_SECONDS, {8}, {3}) == 1, "a copy that began since is not what it waits for"


def test_a_job_that_may_wait_for_a_copy_is_not_lost_before_that_has_ended(stack):
    now = 100.0
    assert [stack.look(now + turn, {8}, {3, turn + 10}) for turn in range(5)] == [0] * 5
    assert stack.look(now + 5, {8}, set()) == 0, "its end may be on its way"
    assert stack.look(now + 6, {8}, set()) == 1


def test_the_copies_of_jobs_that_have_ended_say_nothing_of_others(stack):
    """Without that, a job whose copy is under way was taken for lost."""
    now = 100.0
    assert stack.look(now, {8}, {8, 13}) == 0
    assert stack.look(now + 1, {9}, {19, 21}) == 0
    assert stack.look(now + 2, {9}, {19, 21}) == 0
    assert stack.look(now + 3, {9}, {21}) == 0
    assert stack.look(now + 4, {9}, set()) == 0
    assert stack.look(now + 5, {9}, set()) == 1

"""Jobs that did not end by their deadline: when they count as lost, and the stack with them."""

from __future__ import annotations

from kvtier.stack.jobs import OverdueJobs


def test_a_job_in_time_is_left_alone():
    jobs = OverdueJobs()
    assert not any(jobs.are_lost(set(), set()) for _ in range(3))


def test_a_job_that_waits_for_no_copy_is_lost_at_the_second_look():
    jobs = OverdueJobs()
    assert not jobs.are_lost({8}, set())
    assert jobs.are_lost({8}, {3}), "a copy that began since is not what it waits for"


def test_a_job_that_may_wait_for_a_copy_is_not_lost_before_that_has_ended():
    jobs = OverdueJobs()
    assert [jobs.are_lost({8}, {3, turn + 10}) for turn in range(5)] == [False] * 5
    assert not jobs.are_lost({8}, set()), "its end may be on its way"
    assert jobs.are_lost({8}, set())


def test_the_copies_of_jobs_that_have_ended_say_nothing_of_others():
    """Without that, a job whose copy is under way was taken for lost."""
    jobs = OverdueJobs()
    assert not jobs.are_lost({8}, {8, 13})
    assert not jobs.are_lost({9}, {19, 21})
    assert not jobs.are_lost({9}, {19, 21})
    assert not jobs.are_lost({9}, {21})
    assert not jobs.are_lost({9}, set())
    assert jobs.are_lost({9}, set())


def test_a_job_that_has_the_id_of_one_before_is_another_one():
    """The look at the first had noted its id; the second was then lost at once."""
    jobs = OverdueJobs()
    assert not jobs.are_lost({8}, set())
    jobs.forget(8)
    assert not jobs.are_lost({8}, set())

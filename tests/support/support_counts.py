"""Counts of tests that gain by more of the same: quick ones in every run, full ones with `-m full`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import pytest
from hypothesis import settings

QUICK_PART = 6
"""A quick run has a sixth of the examples."""
Test = TypeVar("Test")
_chosen = {"full": False}


def choose_full_counts() -> None:
    """Full counts from now on, for all modules that are collected later."""
    _chosen["full"] = True


def count(full: int, quick: int) -> int:
    """The count of this run. Tests get it as the fixture `dial`, which gives them the marker `full`."""
    return full if _chosen["full"] else quick


def full_alone() -> list[pytest.MarkDecorator]:
    """Marks of what runs with `-m full` alone."""
    return [pytest.mark.full, pytest.mark.skipif(not _chosen["full"], reason="runs with -m full, as .ci/run does")]


def fully(test: Test) -> Test:
    """A test that runs with `-m full` alone."""
    for mark in full_alone():
        test = mark(test)
    return test


def some(cases: Iterable[Any], quick: int) -> list[Any]:
    """Cases as parameters of a test, those after the first `quick` in a full run alone."""
    return [pytest.param(case, marks=full_alone() if at >= quick else ()) for at, case in enumerate(cases)]


def seeds(full: int, quick: int) -> list[Any]:
    """Seeds from 0 on as parameters of a test, as in `some`."""
    return some(range(full), quick)


def examples(full: int, **more: Any) -> Callable[[Test], Test]:
    """Hypothesis settings of a test with `full` examples, a sixth of them in a quick run, and the marker `full`."""
    limits = limits_of(full, **more)
    return lambda test: pytest.mark.full(limits(test))


def limits_of(full: int, **more: Any) -> settings:
    """The settings of `examples` alone."""
    return settings(**({"deadline": None, "print_blob": True} | more), max_examples=count(full, full // QUICK_PART))


def machine(case: Any, full: int, steps: int) -> Any:
    """The test case of a state machine, with `full` examples as in `examples`."""
    case.settings = limits_of(full, stateful_step_count=steps)
    return pytest.mark.full(case)

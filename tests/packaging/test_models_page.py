"""The table of docs/models.md: its rows are those of `tests/vllm/families.py`, and no cell in it is red."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from families import rows
from family_page import ENOUGH, LOGPROB_MAX, Page, Restored
from support_paths import PROJECT

PAGE = (PROJECT / "docs" / "models.md").read_text()
RELEASES = ("0.32.0", "0.33.0")
ROWS_MIN = 40


def test_the_page_is_what_its_script_writes():
    assert Page.read(PAGE).text() == PAGE


def test_every_row_ran():
    cells = Page.read(PAGE).here.cells
    assert [head.partition(",")[0] for head in sorted(cells)] == [*RELEASES]
    assert [list(column) for column in cells.values()] == [[*rows()]] * len(RELEASES)


def test_what_has_no_exception_came_back():
    for column in Page.read(PAGE).here.cells.values():
        whole = [cell for name, cell in column.items() if not rows()[name].exception]
        assert len(whole) >= ROWS_MIN
        for cell in whole:
            found = re.fullmatch(r"(\d+)/(\d+)/(\d+) (\S+)", cell)
            assert found, cell
            assert min(map(int, found.groups()[:3])) >= 100 * ENOUGH, cell
            assert float(found[4]) <= LOGPROB_MAX, cell


GREEN = Restored({"cpu": 100, "disk": 96, "valkey": 110}, 100, [], 1e-4, True, 100, True)


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"tokens": {"cpu": 100, "disk": 95, "valkey": 100}}, "too little"),
        ({"unequal": ["disk"]}, "disk: other tokens"),
        ({"logprob": 2e-3}, "log-probabilities differ by 2.0e-03"),
        ({"control": False}, "the control"),
    ],
)
def test_a_row_is_red(changes, fault):
    assert GREEN.faults("") == []
    [found] = replace(GREEN, **changes).faults("")
    assert fault in found


def test_an_exception_restores_less_or_differs_as_with_the_own_cache_of_vllm():
    assert GREEN.faults("windows of one more than a block") != []
    assert replace(GREEN, tokens={"cpu": 80, "disk": 100, "valkey": 80}).faults("windows") == []
    differs = replace(GREEN, unequal=["cpu"], logprob=1.0)
    assert replace(differs, own_is_equal=False).faults("vLLM's own") == []
    assert len(differs.faults("vLLM's own")) == 3

"""Each bound of what servers say keeps something: turned off, that is broken."""

from __future__ import annotations

import pytest
from support_counts import some
from support_protections_answers import SWITCHES


@pytest.mark.parametrize("bound", some(SWITCHES, 2))
def test_without_a_bound_what_it_keeps_is_broken(bound: str, monkeypatch: pytest.MonkeyPatch) -> None:
    switch, is_broken = SWITCHES[bound]
    assert not is_broken(), "with the bound"
    switch(monkeypatch)
    assert is_broken(), "without it"

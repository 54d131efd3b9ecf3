"""The border of a step: an exception inside fails the stack once, and every call after that answers."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from support_steps import FACES, lives


@pytest.mark.parametrize("face", FACES)
def test_every_call_answers_after_an_exception_in_any_step(face: str, tmp_path: Path, dial, caplog) -> None:
    """Random steps: jobs end, copies end, the log has one line, close ends; reopened it has right bytes or less."""
    seed = random.randrange(1 << 32)
    steps = dial(100, 25)
    print(f"seed {seed}: lives({face!r}, folder, {seed}, {steps})")
    found = lives(face, tmp_path, seed, steps)
    failures = [record for record in caplog.records if record.levelname == "CRITICAL"]
    print(f"{found.struck} of {found.lives} lives struck, {found.checked} checked, {found.loaded} blocks compared")
    assert found.lives == steps
    assert found.checked > steps // 2
    assert found.loaded > steps
    assert len({*found.raised}) > steps // 5, "most lives were struck at the same step"
    assert found.checked <= len(failures) <= 2 * found.struck, "a line of the dispatcher, and one of the plane"

"""The option `write_bytes_per_day` of the tier `fs`."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from kvtier.options import LimitsWrites
from kvtier_fs.options import FSOptions

PLACE = {"roots": ["/mnt/a"], "capacity": "1GiB"}


@pytest.mark.parametrize("admit", ["always", "second_use"])
def test_a_budget_needs_the_admission_that_keeps_to_it(admit: str) -> None:
    with pytest.raises(ValidationError, match="write_bytes_per_day needs admit: predicted"):
        FSOptions.model_validate(PLACE | {"admit": admit, "write_bytes_per_day": "1GiB"})


def test_engines_of_one_file_share_it() -> None:
    options = FSOptions.model_validate(PLACE | {"admit": "predicted", "write_bytes_per_day": "1GiB"})
    assert isinstance(options, LimitsWrites)
    assert options.write_bytes_per_day == 1 << 30
    assert [options.share(index, 4).write_bytes_per_day for index in range(4)] == [1 << 28] * 4
    assert FSOptions.model_validate(PLACE).share(0, 4).write_bytes_per_day is None

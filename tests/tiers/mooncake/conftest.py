"""One pool for the tests of the tier; those that break it start one of their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support_mooncake import Pool, mooncake_pool


@pytest.fixture(scope="session")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    with mooncake_pool(tmp_path_factory.mktemp("mooncake")) as one:
        yield one


@pytest.fixture
def own_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """A pool that may be broken."""
    with mooncake_pool(tmp_path_factory.mktemp("mooncake"), 128 << 20) as one:
        yield one

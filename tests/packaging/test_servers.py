"""Where a server is absent its tests are skipped and say what is missing; in the lane of servers they fail."""

from __future__ import annotations

import os

import pytest
from support_servers import REQUIRED, server_program


def test_outside_the_lane_an_absent_server_is_a_skip_that_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(REQUIRED, raising=False)
    with pytest.raises(pytest.skip.Exception, match="needs no-such-server: apt-get install it"):
        server_program("no-such-server", "apt-get install it")


def test_in_the_lane_it_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(REQUIRED, "required")
    with pytest.raises(pytest.fail.Exception, match="needs no-such-server: apt-get install it"):
        server_program("no-such-server", "apt-get install it")


@pytest.mark.remote
def test_asking_for_the_lane_is_what_makes_the_difference(request: pytest.FixtureRequest) -> None:
    asked = "remote" in request.config.getoption("-m")
    assert (os.environ.get(REQUIRED) == "required") == asked

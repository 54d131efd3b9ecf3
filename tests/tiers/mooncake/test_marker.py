"""The marker of a namespace in a pool, and a process that goes on late with what it wanted to write."""

from __future__ import annotations

import pytest
from support_mooncake import Pool

from kvtier_remote.mooncake import marker_object
from kvtier_remote.mooncake.client_process import ClientProcess
from kvtier_remote.mooncake.marker_object import MEMORY_BYTES, read_marker, swap_marker
from kvtier_remote.transport import Marker

pytestmark = [pytest.mark.remote, pytest.mark.mooncake]
OWN = b"\x01" * 8


@pytest.fixture
def connection(pool: Pool):
    one = ClientProcess(pool.options(), MEMORY_BYTES)
    one.open()
    yield one
    one.close()


def test_a_state_that_is_put_back_late_is_followed_to_the_last(connection):
    """A process is stopped between its last look at the marker and its write, while others go on."""
    states = []
    held = None
    for epoch in range(4):
        held = swap_marker(connection, "late", held, Marker(OWN, epoch))
        assert held == Marker(OWN, epoch)
        states.append(marker_object._read(connection, "late"))
    for late in states:
        marker_object._replace(connection, "late", marker_object._read(connection, "late"), late)
        assert read_marker(connection, "late") == Marker(OWN, 3)
        assert swap_marker(connection, "late", None, Marker(OWN, 0)) == Marker(OWN, 3)
    assert swap_marker(connection, "late", Marker(OWN, 3), Marker(OWN, 4)) == Marker(OWN, 4)


def test_a_late_state_of_a_marker_that_was_lost_is_not_written_over_the_new_one(connection):
    """A process is stopped between reading the marker and asking for its write, in which time it is made anew."""
    swap_marker(connection, "lost", None, Marker(OWN, 0))
    late = marker_object._read(connection, "lost")
    connection.ask("remove", ["lost"])
    other = Marker(b"\x02" * 8, 1)
    assert swap_marker(connection, "lost", None, other) == other
    with pytest.raises(OSError, match="code -706"):
        marker_object._replace(connection, "lost", late, marker_object.State(Marker(OWN, 1)))
    assert read_marker(connection, "lost") == other

"""Markers of namespaces in a store that has no compare-and-set: a value that is overwritten, and claims to do so.

The marker is one value, so that it is lost as a whole. Each of its states has a random id; who wants to change it
creates the claim of that id, which holds the next state. A claim is created once, by the first of those who race, and
all who find it write that state over the marker, where that still holds what they read. Claims stay, so a slow writer
that puts an older state back harms nothing: a reader follows the claims from there.

One thing is not closed. Between the client's last look at the marker and its write, which are two requests, the marker
may be lost and made again; the write brings the lost one's incarnation back then.
"""

from __future__ import annotations

import errno
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvtier.tier.shared_epoch import EPOCH_CEILING
from kvtier_remote.answers import Deadline
from kvtier_remote.mooncake.client_process import MISSING_CODES, ClientProcess, os_error
from kvtier_remote.transport import Marker

SIZE = 64
MEMORY_BYTES = 2 * SIZE
"""Memory of a client that raises markers: room for two states."""
_ATTEMPTS = 100
_REREADS = 8
_PAUSE_SECONDS = 0.003
"""A value that another client has begun to write is missing until it is complete, and cannot be created."""


@dataclass(frozen=True, slots=True)
class State:
    """A state of a marker."""

    marker: Marker
    id: str = field(default_factory=lambda: secrets.token_hex(8))

    def encoded(self) -> bytes:
        """64 bytes of text."""
        return f"{self.marker.incarnation.hex()} {self.marker.epoch} {self.id}".ljust(SIZE).encode()


def swap_marker(connection: ClientProcess, name: str, held: Marker | None, marker: Marker) -> Marker | None:
    """See `kvtier_remote.transport.Transport.swap_marker`. Raises OSError, EBUSY if others write all the time."""
    following, deadline = State(marker), Deadline(connection.patience_seconds)
    for attempt in range(_ATTEMPTS):
        time.sleep(min(attempt, 10) * _PAUSE_SECONDS)
        try:
            state = _current(connection, name, deadline)
            if attempt and _read(connection, f"{name}.{following.id}") is not None:
                return marker  # it was there, and another client has followed it since
            if state == following or usable(state) != held:
                return usable(state)
            _create(connection, name if state is None else f"{name}.{state.id}", following)
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
    raise OSError(errno.EBUSY, "other clients write the marker")


def read_marker(connection: ClientProcess, name: str) -> Marker | None:
    """The marker as its claims leave it; nothing is written. Raises OSError."""
    return usable(_follow(connection, name, Deadline(connection.patience_seconds))[1])


def usable(state: State | None) -> Marker | None:
    """The marker of a state; None if there is none, or if it states an epoch that none can have."""
    return None if state is None or state.marker.epoch >= EPOCH_CEILING else state.marker


def _current(connection: ClientProcess, name: str, deadline: Deadline) -> State | None:
    """The state that no claim follows. It is in the marker then."""
    held, state = _follow(connection, name, deadline)
    if held is not None and state is not None and state is not held:
        _replace(connection, name, held, state)
    return state


def _follow(connection: ClientProcess, name: str, deadline: Deadline) -> tuple[State | None, State | None]:
    """The state in the marker, and the one that its claims lead to. Claims in a circle, and those that lead on beyond
    the deadline, raise OSError."""
    held = state = _read(connection, name)
    for reread in range(_REREADS):
        if state is not None:
            break
        time.sleep(reread * _PAUSE_SECONDS)  # what is replaced at this moment is missing
        held = state = _read(connection, name)
    seen = set[str]()
    while state is not None and (claimed := _read(connection, f"{name}.{state.id}")) is not None:
        if state.id in seen:
            raise _no_marker()
        deadline.check()
        seen.add(state.id)
        state = claimed
    return held, state


def _read(connection: ClientProcess, name: str) -> State | None:
    (code,) = connection.ask("get", [name], [0], [SIZE])
    if code in MISSING_CODES:
        return None
    if code != SIZE:
        raise os_error(code) if code < 0 else _no_marker()
    try:
        incarnation, epoch, number = connection.memory[:SIZE].tobytes().decode("ascii").split()
        return State(Marker(bytes.fromhex(incarnation), int(epoch)), number)
    except ValueError:
        raise _no_marker() from None


def _create(connection: ClientProcess, name: str, state: State) -> None:
    connection.memory[:SIZE] = bytearray(state.encoded())
    _check(connection.ask("create", [name], [0], [SIZE]))


def _replace(connection: ClientProcess, name: str, held: State, state: State) -> None:
    """Write a state over the marker, unless it holds another one than was read: then others have written it."""
    connection.memory[:MEMORY_BYTES] = bytearray(state.encoded() + held.encoded())
    _check(connection.ask("replace", [name], [0, SIZE], [SIZE]))


def _check(codes: Sequence[int]) -> None:
    if codes[0] < 0:
        raise os_error(codes[0])


def _no_marker() -> OSError:
    return OSError(errno.EBADMSG, "what is under the marker's name is no marker")

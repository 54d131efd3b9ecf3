"""Engines and stack processes of different releases: the protocol that both speak, and the recording of protocol 1."""

from __future__ import annotations

import mmap
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_type_hints

import msgspec
import pytest
from make_conversation import ITEMS, ROWS, STACK, RecordedLife, example, handled, steady
from support_conversation import ENGINE, INCARNATION, SERVICE, Entry, Player, Recording, with_more
from support_served import served
from support_service import SECONDS, TestEngine, until

from kvtier.client import connection
from kvtier.client.copies import outcome_of
from kvtier.client.stack_client import StackClient
from kvtier.errors import ConfigError
from kvtier.service import server, wire
from kvtier.service.channel import receive_greeting, send_greeting
from kvtier.service.wire import GREETING, PROTOCOLS, Hello, Welcome, WireError
from kvtier.types.hints import HintRefusal, HintResult, Retain

NEXT = (1, 2)
RECORDED = Recording.read()
recorded_pages = pytest.mark.skipif(mmap.PAGESIZE != 4096, reason="it was recorded where pages have 4096 bytes")


# -- the protocol of a connection ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("of_service", "of_engine", "common"),
    [((1,), (1,), 1), ((1,), NEXT, 1), (NEXT, (1,), 1), (NEXT, (2,), 2), (NEXT, NEXT, 2), (NEXT, (2, 3), 2)],
)
def test_the_newest_protocol_that_both_speak_is_spoken(of_service, of_engine, common, tmp_path, monkeypatch):
    monkeypatch.setattr(server, "PROTOCOLS", of_service)
    monkeypatch.setattr(connection, "PROTOCOLS", of_engine)
    with served(tmp_path) as found, TestEngine(found.path) as engine:
        assert engine.client.welcome.protocol == common
        assert engine.store(range(8)) == ["stored"] * 8
        assert engine.load(range(8)) == ["hit"] * 8


def test_without_a_common_protocol_an_engine_is_refused_in_one_line(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(server, "PROTOCOLS", NEXT)
    monkeypatch.setattr(connection, "PROTOCOLS", (3, 4))
    with served(tmp_path) as found:
        with pytest.raises(ConfigError) as raised:
            TestEngine(found.path)
        assert str(raised.value) == (
            f"the stack process at {found.path} does not serve this engine: "
            "this release speaks protocols [1, 2], the engine [3, 4]"
        )
    assert [line for line in caplog.messages if "protocol" in line] == [
        "a process is not served: this release speaks protocols [1, 2], the engine [3, 4]"
    ]


def test_an_answer_in_a_protocol_that_was_not_offered_is_refused_in_one_line(tmp_path):
    path = str(tmp_path / "socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(path)
        listening.listen()

        def answer() -> None:
            with listening.accept()[0] as sock:
                receive_greeting(sock, GREETING)
                send_greeting(sock, Welcome(9, "", 1, ROWS, 4096, 4096))

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(ConfigError, match="it answered in protocol 9, this release speaks"):
            TestEngine(path)
        thread.join(SECONDS)


# -- what a release may add ----------------------------------------------------------------------------------------


def test_fields_at_the_end_may_be_more_or_fewer_and_all_else_is_refused():
    def decode(*item: Any) -> list[Any]:
        return wire.FROM_ENGINE.decode(msgspec.msgpack.encode([0, [item]]))[1]

    assert decode(7, 5, 6, "more", [1]) == [wire.Want(5, 6)]
    assert decode(7, 5) == [wire.Want(5)]
    assert decode(20, 1, [2, b"keys", "more"]) == [wire.Look(1, wire.Keys(2, b"keys"))]
    for wrong in [(7,), (7, "5"), (99, 5), (120, 5), (32, 1, b"", [b"", b""])]:
        with pytest.raises(WireError):
            decode(*wrong)


def test_reasons_of_a_later_release_are_failures():
    assert not outcome_of("dropped", "a later reason", 0).ok
    assert not outcome_of("a later status", "", 0).ok
    answers = [wire.Hinted(1, 2, {"a later reason": 3, "stopped": 1})]
    client: Any = SimpleNamespace(_ask=lambda items: answers)
    assert StackClient.hint(client, Retain((), 1.0)) == HintResult(2, {HintRefusal.STOPPED: 4})


# -- the recording -------------------------------------------------------------------------------------------------


def play_engine(entries: Sequence[Entry], folder: Path) -> None:
    """The recorded engine at a stack process of today."""
    with served(folder, STACK) as found:
        found.server.incarnation = INCARNATION
        player = Player(entries, found.path, ENGINE, handled(found))
        player.cut()
        player.play()
        until(lambda: not found.engines and found.rests(), "the rows are free")


@contextmanager
def play_service(entries: Sequence[Entry], path: str) -> Iterator[Player]:
    """The recorded stack process for an engine of today, with rows as they were then."""
    player = Player(entries, path, SERVICE)
    faults: list[BaseException] = []

    def play() -> None:
        try:
            player.play()
        except AssertionError as error:
            faults.append(error)

    thread = threading.Thread(target=play)
    thread.start()
    try:
        yield player
    except BaseException:
        player.stop()
        raise
    finally:
        thread.join(SECONDS)
        assert not faults, faults


@recorded_pages
@pytest.mark.parametrize("protocols", [PROTOCOLS, NEXT])
@pytest.mark.parametrize("more", [(), ("a field more",)])
def test_a_recorded_engine_is_answered_as_then(protocols, more, tmp_path, monkeypatch):
    monkeypatch.setattr(server, "PROTOCOLS", protocols)
    play_engine(with_more(RECORDED.entries, ENGINE, *more), tmp_path)


@recorded_pages
@pytest.mark.parametrize("protocols", [PROTOCOLS, NEXT])
@pytest.mark.parametrize("more", [(), ("a field more",)])
def test_an_engine_lives_at_a_recorded_stack_process_as_then(protocols, more, tmp_path, monkeypatch):
    monkeypatch.setattr(connection, "PROTOCOLS", protocols)
    path = str(tmp_path / "socket")
    with steady(), play_service(with_more(RECORDED.entries, SERVICE, *more), path) as player:
        life = RecordedLife(path, player.cut)
        life.run()
    assert life.outcomes == RECORDED.outcomes


@recorded_pages
@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("kvtier.service.open_lookups.IN_ROW", wire.PENDING),
        ("kvtier.service.weights.UNCHANGED", wire.CHANGED),
        ("kvtier.service.wire.Places.of", lambda rows, generations: wire.Places(b"", b"")),
        ("kvtier_cpu.region.shared_region.VERSION", 99),
        ("kvtier_cpu.region.shared_region.HEADER_BYTES", 8192),
    ],
)
def test_a_stack_process_that_means_something_else_differs(place, value, tmp_path, monkeypatch):
    monkeypatch.setattr(place, value)
    with pytest.raises(AssertionError, match="of the recording"):
        play_engine(RECORDED.entries, tmp_path)


@recorded_pages
@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("kvtier.service.wire.Places.of", lambda rows, generations: wire.Places(b"", b"")),
        ("kvtier.client.core.LENT_MIN", 32),
        ("kvtier_cpu.region.shared_region.VERSION", 99),
    ],
)
def test_an_engine_that_means_something_else_differs(place, value, tmp_path, monkeypatch):
    monkeypatch.setattr(place, value)
    path = str(tmp_path / "socket")
    with (
        pytest.raises(AssertionError, match="of the recording"),
        steady(),
        play_service(RECORDED.entries, path) as player,
    ):
        RecordedLife(path, player.cut).run()


def test_items_have_the_recorded_fields_and_bytes():
    """What a release adds to an item comes after that. A new item needs a new protocol: see `make_conversation`."""
    kinds = {kind.__name__: kind for kind in ITEMS}
    names = [name for name, _, _ in RECORDED.examples]
    assert names == list(kinds) if PROTOCOLS == (1,) else set(names) <= set(kinds)
    for name, fields, item in RECORDED.examples:
        kind = kinds[name]
        assert list(kind.__struct_fields__[: len(fields)]) == fields
        found, hints = msgspec.msgpack.decode(item, type=kind), get_type_hints(kind)
        for at, each in enumerate(fields, 1):
            assert getattr(found, each) == example(hints[each], each, at), (name, each)
        assert msgspec.msgpack.encode(example(kind))[1:].startswith(item[1:]), name


def test_the_recording_has_every_item_of_an_engine_and_its_workers():
    sent = {type(item) for entry in RECORDED.entries if entry.message for item in entry.decode()[1]}
    assert sent >= {Hello, Welcome, *wire.FromEngine, *wire.FromWorker, *wire.ToWorker}
    assert set(wire.ToEngine) - sent == {wire.Revoke, wire.Void}  # for several engines

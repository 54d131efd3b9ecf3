"""Processes that race for one region: one owner, none maps early, and none leaves anything behind, whenever it dies."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support_region import Peer, named

from kvtier.errors import RegionError
from kvtier.types.arrays import int_array
from kvtier_cpu import open_region

ENGINE = "race"
PEERS = 8
CREATOR_STEPS = ("published", "resident", "linked", "counted", "ready")
JOINER_STEPS = ("joining", "mapped", "joined")


@pytest.fixture(scope="module")
def crowd() -> Iterator[list[Peer]]:
    """Eight processes that live as long as the module."""
    peers = [Peer() for _ in range(PEERS)]
    yield peers
    for peer in peers:
        peer.kill()


@pytest.fixture
def peers() -> Iterator[list[Peer]]:
    """Processes a test may kill; the fixture ends what is left of them."""
    started: list[Peer] = []
    yield started
    for peer in started:
        peer.kill()


def spec_of(shm: Path, participant: int, participants: int) -> dict[str, object]:
    return {"directory": str(shm), "engine_id": ENGINE, "participants": participants, "participant": participant}


def race(crowd: list[Peer], shm: Path, rng: random.Random) -> None:
    """One round: all open at one instant, give or take a little; then all close."""
    start = time.monotonic() + 0.01
    for i, peer in enumerate(crowd):
        peer.ask("open", spec=spec_of(shm, i, len(crowd)), at=start + rng.choice([0, 0, rng.random() * 0.004]))
    replies = [peer.answer() for peer in crowd]
    opened = [reply for reply in replies if reply is not None and "error" not in reply]
    assert len(opened) == len(crowd), replies
    assert len({reply["incarnation"] for reply in opened}) == 1
    creators = [reply["steps"] for reply in opened if "ready" in reply["steps"]]
    assert len(creators) == 1
    for reply in opened:
        assert reply["ready"]
        assert reply["steps"].get("mapped", float("inf")) > creators[0]["counted"]
    assert os.listdir(shm) == []
    for peer in crowd:
        peer.ask("close")
    assert all(peer.answer() is not None for peer in crowd)


def test_the_first_one_creates_and_none_maps_an_unready_region(crowd: list[Peer], shm: Path, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(30):
        race(crowd, shm, rng)


@pytest.mark.long
@pytest.mark.parametrize("rounds", [200, 20_000])
def test_the_race_has_one_owner_every_time(crowd: list[Peer], shm: Path, rounds: int, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(rounds):
        race(crowd, shm, rng)


def test_all_processes_see_the_same_bytes_and_stamps(peers: list[Peer], shm: Path) -> None:
    peers += [Peer(), Peer()]
    peers[0].call("open", spec=spec_of(shm, 0, 3))
    peers[1].call("open", spec=spec_of(shm, 1, 3))
    region = open_region(named(shm, ENGINE, 3, 2))
    peers[0].call("write", row=5, value=77)
    assert (region.view[5] == 77).all()
    region.view[6] = 78
    assert peers[1].call("read", row=6) == {"values": [78]}

    rows, generations = int_array([5, 6]), int_array([40, 41])
    peers[0].call("stamp", worker=0, rows=[5, 6], generations=[40, 41])
    assert region.stamped(rows, generations).tolist() == [False, False]
    peers[1].call("stamp", worker=1, rows=[5, 6], generations=[40, 39])
    assert region.stamped(rows, generations).tolist() == [True, False]
    assert region.uses_ended(0, rows).tolist() == [1, 1]
    region.close()


@pytest.mark.parametrize("step", CREATOR_STEPS)
def test_a_creator_killed_at_any_step_leaves_a_region_to_the_next(peers: list[Peer], shm: Path, step: str) -> None:
    peers += [Peer(), Peer()]
    assert peers[0].call("open", spec=spec_of(shm, 0, 2), die_at=step) is None
    peers[0].process.wait()
    reply = peers[1].call("open", spec=spec_of(shm, 1, 2))
    assert reply is not None
    assert "ready" in reply["steps"], reply
    peers.append(Peer())
    joined = peers[2].call("open", spec=spec_of(shm, 0, 2))
    assert joined is not None
    assert joined["incarnation"] == reply["incarnation"]
    assert os.listdir(shm) == []


@pytest.mark.parametrize("step", ["published", "resident", "counted"])
def test_peers_waiting_for_a_creator_that_dies_elect_another(peers: list[Peer], shm: Path, step: str) -> None:
    peers += [Peer(), Peer(), Peer()]
    peers[0].ask("open", spec=spec_of(shm, 0, 3), stop_at=step)
    os.waitid(os.P_PID, peers[0].process.pid, os.WSTOPPED)
    for i in (1, 2):
        peers[i].ask("open", spec=spec_of(shm, i, 3))
    peers[0].kill()
    replies = [peers[i].answer() for i in (1, 2)]
    assert all(reply is not None and "incarnation" in reply for reply in replies), replies
    peers[0] = Peer()
    last = peers[0].call("open", spec=spec_of(shm, 0, 3))
    assert last is not None
    assert {reply["incarnation"] for reply in (*replies, last) if reply} == {last["incarnation"]}
    assert os.listdir(shm) == []


def test_a_creator_that_never_gets_ready_is_a_typed_error_at_the_deadline(peers: list[Peer], shm: Path) -> None:
    peers.append(Peer())
    peers[0].ask("open", spec=spec_of(shm, 0, 2), stop_at="resident")
    os.waitid(os.P_PID, peers[0].process.pid, os.WSTOPPED)
    with pytest.raises(RegionError, match="gave up waiting"):
        open_region(named(shm, ENGINE, 2, 1, deadline_seconds=0.05))
    peers[0].process.send_signal(signal.SIGCONT)
    assert peers[0].answer() is not None
    open_region(named(shm, ENGINE, 2, 1)).close()
    assert os.listdir(shm) == []


@pytest.mark.parametrize("step", JOINER_STEPS)
def test_a_joiner_killed_at_any_step_does_not_hold_up_the_others(peers: list[Peer], shm: Path, step: str) -> None:
    with_creator = open_region(named(shm, ENGINE, 3, 0))
    peers.append(Peer())
    assert peers[0].call("open", spec=spec_of(shm, 1, 3), die_at=step) is None
    other = open_region(named(shm, ENGINE, 3, 2))
    assert other.incarnation == with_creator.incarnation
    other.close()
    with_creator.close()
    assert os.listdir(shm) == []


def test_killing_everyone_after_all_have_mapped_leaves_nothing(peers: list[Peer], shm: Path) -> None:
    peers += [Peer(), Peer()]
    for i, peer in enumerate(peers):
        assert "incarnation" in (peer.call("open", spec=spec_of(shm, i, 2)) or {})
    for peer in peers:
        peer.kill()
    peers.clear()
    assert os.listdir(shm) == []


@pytest.mark.parametrize("step", CREATOR_STEPS)
def test_killing_everyone_before_that_is_swept_by_the_next_start_of_anything(
    peers: list[Peer], shm: Path, step: str
) -> None:
    peers.append(Peer())
    assert peers[0].call("open", spec=spec_of(shm, 0, 2), die_at=step) is None
    peers[0].process.wait()
    assert os.listdir(shm) != []
    other = open_region(named(shm, "another", 1))
    assert os.listdir(shm) == []
    other.close()


def test_the_last_joiner_killed_before_it_removed_the_name_leaves_a_name_the_creator_takes_away(
    peers: list[Peer], shm: Path
) -> None:
    creator = open_region(named(shm, ENGINE, 2, 0))
    peers.append(Peer())
    assert peers[0].call("open", spec=spec_of(shm, 1, 2), die_at="joined") is None
    peers[0].process.wait()
    assert len(os.listdir(shm)) == 2
    creator.close()
    assert os.listdir(shm) == []


def chaos(shm: Path, peers: list[Peer], rng: random.Random) -> None:
    """One round: all open at once, one dies at some step, and is started again; then all close."""
    victim = rng.randrange(len(peers))
    for i, peer in enumerate(peers):
        die_at = rng.choice(CREATOR_STEPS + JOINER_STEPS) if i == victim else None
        peer.ask("open", spec=spec_of(shm, i, len(peers)), die_at=die_at)
    replies = [peer.answer() for peer in peers]
    if replies[victim] is None:
        peers[victim].kill()
        peers[victim] = Peer()
        replies[victim] = peers[victim].call("open", spec=spec_of(shm, victim, len(peers)))
    for reply in replies:
        assert reply is not None
        assert "incarnation" in reply or reply["error"] == "RegionError", reply
    for peer in peers:
        assert peer.call("close") is not None
    assert os.listdir(shm) == []


def test_one_that_dies_anywhere_in_a_race_leaves_a_region_or_a_typed_error(
    peers: list[Peer], shm: Path, seed: int
) -> None:
    peers += [Peer() for _ in range(3)]
    rng = random.Random(seed)
    for _ in range(6):
        chaos(shm, peers, rng)


@pytest.mark.long
def test_many_that_die_anywhere_in_many_races(peers: list[Peer], shm: Path, seed: int) -> None:
    peers += [Peer() for _ in range(4)]
    rng = random.Random(seed)
    for _ in range(300):
        chaos(shm, peers, rng)

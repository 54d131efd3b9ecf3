"""Names of others in shared memory: an opening looks at few of them, opens none, and still sweeps its own dead."""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support_region import Peer, named

import kvtier_cpu.region.opening as opening
import kvtier_cpu.region.rendezvous as rendezvous
from kvtier_cpu import Sharing, open_region

FOREIGN = 20_000
OTHER_USER = 12_345
ENOUGH_CALLS = 3 * rendezvous.CLAIMS_MAX + 100
"""Calls to the system that an opening may make, however many names there are."""


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts calls of `os` that opening a region makes, and the names it is given by listings, as `names`."""
    counts: Counter[str] = Counter()

    def counted(name: str, call: Any) -> Any:
        def count(*arguments: Any, **more: Any) -> Any:
            counts[name] += 1
            return call(*arguments, **more)

        return count

    class Scan:
        def __init__(self, path: str) -> None:
            self._entries = os.scandir(path)

        def __enter__(self) -> Iterator[os.DirEntry[str]]:
            counts["listings"] += 1
            return self._names()

        def _names(self) -> Iterator[os.DirEntry[str]]:
            for entry in self._entries:
                counts["names"] += 1
                yield entry

        def __exit__(self, *_: object) -> None:
            self._entries.close()

    proxy = SimpleNamespace(**{name: getattr(os, name) for name in dir(os) if not name.startswith("__")})
    for name in ("open", "close", "stat", "fstat", "lstat", "unlink", "link", "listdir"):
        setattr(proxy, name, counted(name, getattr(os, name)))
    proxy.scandir = Scan
    monkeypatch.setattr(rendezvous, "os", proxy)
    monkeypatch.setattr(opening, "os", proxy)
    return counts


def crowded(shm: Path, prefix: str, count: int = FOREIGN) -> None:
    """Fill a folder with names of a file that no region may use: of another user, or readable for all."""
    seed = shm / "seed"
    seed.touch(0o600)
    if os.geteuid() == 0:
        os.chown(seed, OTHER_USER, OTHER_USER)
    else:
        seed.chmod(0o644)
    for number in range(count):
        os.link(seed, shm / f"{prefix}{number:032x}.control")


@pytest.mark.parametrize("prefix", ["kvtier-", f"kvtier-{OTHER_USER}-", f"kvtier-{os.geteuid()}-"])
def test_names_of_others_are_not_opened(shm: Path, calls: Counter[str], prefix: str) -> None:
    """The last prefix is ours, on files that are not: anyone may make such names."""
    crowded(shm, prefix)
    open_region(named(shm, "e", 1)).close()
    assert sum(calls.values()) - calls["names"] <= ENOUGH_CALLS, calls
    assert calls["names"] <= FOREIGN + 10
    assert len(os.listdir(shm)) == FOREIGN + 1
    assert stat.S_IMODE(os.stat(shm / "seed").st_mode) in (0o600, 0o644)


def test_a_listing_ends_at_a_bound(shm: Path, calls: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "NAMES_MAX", 100)
    crowded(shm, "kvtier-", 1000)
    open_region(named(shm, "e", 1)).close()
    assert calls["names"] <= 100


def test_only_who_creates_a_named_region_lists_names(shm: Path, calls: Counter[str]) -> None:
    for sharing in (Sharing.PRIVATE, Sharing.MEMFD):
        open_region(replace(named(shm, "e", 1), sharing=sharing)).close()
    assert calls["listings"] + calls["listdir"] == 0
    creator = open_region(named(shm, "e", 2, 0))
    assert calls["listings"] == 1
    joined = open_region(named(shm, "e", 2, 1))
    assert calls["listings"] == 1
    joined.close()
    creator.close()


def test_what_ones_own_dead_left_is_swept_among_names_of_others(shm: Path) -> None:
    peer = Peer()
    spec = {"directory": str(shm), "engine_id": "dead", "participants": 2, "participant": 0}
    assert peer.call("open", spec=spec, die_at="counted") is None
    peer.kill()
    left = set(os.listdir(shm))
    assert len(left) == 2
    crowded(shm, f"kvtier-{OTHER_USER}-", 2000)
    open_region(named(shm, "e", 1)).close()
    assert not left & set(os.listdir(shm))


def test_a_sweep_does_not_wait_for_a_gate_that_stays_shut(shm: Path) -> None:
    """A process that was stopped behind the gate of a dead region holds up no other engine."""
    peer = Peer()
    spec = {"directory": str(shm), "engine_id": "dead", "participants": 2, "participant": 0}
    assert peer.call("open", spec=spec, die_at="counted") is None
    peer.kill()
    claim = rendezvous.open_claim(rendezvous.Names.of(str(shm), "dead"))
    assert claim is not None
    looks = iter(range(1000))
    try:
        with claim.gate(rendezvous.Patience(lambda: 0.0, 1.0, opening.RegionHost().stop)):
            host = opening.RegionHost(clock=lambda: float(next(looks)))  # a second passes at each look
            open_region(named(shm, "e", 1, deadline_seconds=500.0), host).close()
    finally:
        claim.close()
    assert next(looks) < 50
    assert len(os.listdir(shm)) == 2

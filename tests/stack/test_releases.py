"""Hosts of release 31f3a23 and of this one on one server and in one folder, in any order: no old weights, no alarm."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from support_counts import fully
from support_paths import SUPPORT
from support_valkey import Server, stack_tier, valkey_server

from faults.machine import warm

BEFORE = "31f3a23"
ROOT = SUPPORT.parent.parent


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources of the release before."""
    look = ["git", "cat-file", "-e", f"{BEFORE}^{{commit}}"]
    if shutil.which("git") is None or subprocess.run(look, cwd=ROOT, capture_output=True, check=False).returncode:
        pytest.skip(f"needs the git history, for the sources of {BEFORE}")
    tree = tmp_path_factory.mktemp("earlier")
    archive = subprocess.run(
        ["git", "archive", BEFORE, "kvtier", "backends"], cwd=ROOT, capture_output=True, check=True
    )
    subprocess.run(["tar", "x", "-C", tree], input=archive.stdout, check=True)
    return tree


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with valkey_server() as one:
        yield one


class Process:
    """A host's process. `weights` are those it computes with; None: its stack is not open."""

    def __init__(self, tree: Path, stack_file: str) -> None:
        self.tree = tree
        environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(tree), str(tree / "backends")))}
        start = warm.Popen if tree == ROOT else subprocess.Popen
        self.child = start(
            [sys.executable, SUPPORT / "support_release_host.py"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self.weights: int | None = None
        self.ask("use", stack_file)  # the next process of this release finds its modules compiled

    def ask(self, *command: object) -> Any:
        assert self.child.stdin is not None
        print(json.dumps(command), file=self.child.stdin, flush=True)
        assert self.child.stdout is not None
        return json.loads(self.child.stdout.readline())

    def end(self) -> None:
        assert self.child.stdin is not None
        self.child.stdin.close()
        assert self.child.wait(60) == 0
        assert self.child.stdout is not None
        self.child.stdout.close()


class Fleet:
    """Two hosts of each release, and the weights that a rollout has brought to all of them."""

    def __init__(self, trees: list[Path], stack_file: str, server: Server, rng: Random) -> None:
        self.rng = rng
        self.server = server
        self.hosts = [Process(tree, stack_file) for tree in trees]
        self.newest = 1
        self.found = 0
        self.trace: list[str] = []

    def step(self) -> None:
        """One event."""
        host = self.rng.choice(self.hosts)
        if host.weights is None:
            assert host.ask("open").startswith(str(host.tree)), "it runs under the other release"
            host.weights = self.newest
            self.note(host, "open")
            return
        event = self.rng.choices((self.store, self.load, self.close, self.roll_out, self.evict), (4, 5, 2, 1.5, 0.7))[0]
        event(host)

    def note(self, host: Process, what: str) -> None:
        self.trace.append(f"host {self.hosts.index(host)} ({host.weights}) {what}")

    def store(self, host: Process) -> None:
        host.ask("store", host.weights)
        self.note(host, "stores")

    def load(self, host: Process) -> None:
        found = host.ask("load")
        self.note(host, f"finds {found}")
        self.found += len(found)
        assert set(found) <= {host.weights}, "\n".join(self.trace)

    def close(self, host: Process) -> None:
        assert host.ask("close") == 0, "an alarm of corruption"
        self.note(host, "closed")
        host.weights = None

    def roll_out(self, _: Process) -> None:
        """New weights for all, one after another, in any order; each looks before the next."""
        self.newest += 1
        for host in self.rng.sample(self.hosts, len(self.hosts)):
            if host.weights is not None:
                host.ask("reset")
                host.weights = self.newest
                self.note(host, "reset")
                self.load(host)

    def evict(self, host: Process) -> None:
        self.server.client.delete(*self.server.names("*:m:*") or ["none"])
        self.note(host, "the marker is evicted")

    def end(self) -> None:
        for host in self.hosts:
            if host.weights is not None:
                self.close(host)
            host.end()


def run(seed: int, steps: int, trees: list[Path], server: Server, folder: Path) -> int:
    """A fleet's life. Returns how many blocks were found."""
    server.client.flushall()
    rng = Random(f"releases {seed}")
    below = [stack_tier(server)]
    if rng.random() < 0.5:
        below.append({"type": "shared_fs", "root": folder / f"shared-{seed}", "capacity": "16MiB", "min_free_bytes": 0})
    lines = ["{" + ", ".join(f"{name}: {value}" for name, value in tier.items()) + "}" for tier in below]
    text = "tiers:\n  - type: gpu\n  - {type: cpu, cpu_bytes_to_use: 64KiB}\n" + "".join(f"  - {x}\n" for x in lines)
    fleet = Fleet(trees, text, server, rng)
    for _ in range(steps):
        fleet.step()
    fleet.end()
    return fleet.found


@fully
def test_hosts_of_two_releases_find_no_other_weights(earlier, server, tmp_path):
    trees = [earlier, ROOT, earlier, ROOT]
    assert run(1, 40, trees, server, tmp_path) > 0


@pytest.mark.long
@pytest.mark.parametrize("seed", range(100, 130))
def test_hosts_of_two_releases_find_no_other_weights_in_any_order(earlier, server, tmp_path, seed):
    run(seed, 80, [earlier, ROOT, earlier, ROOT], server, tmp_path)


@fully
def test_stores_of_the_release_before_hit_as_before(earlier, server, tmp_path):
    """A server, a shared folder and a disk that it wrote."""
    server.client.flushall()
    stores = [stack_tier(server)]
    stores.append({"type": "shared_fs", "root": tmp_path / "shared", "capacity": "16MiB", "min_free_bytes": 0})
    stores.append({"type": "fs", "roots": f"[{tmp_path / 'disk'}]", "capacity": "8MiB", "min_free_bytes": 0})
    before, now = Process(earlier, ""), Process(ROOT, "")
    for store in stores:
        line = "{" + ", ".join(f"{name}: {value}" for name, value in store.items()) + "}"
        text = f"tiers:\n  - type: gpu\n  - {{type: cpu, cpu_bytes_to_use: 64KiB}}\n  - {line}\n"
        for command in (("use", text), ("open",), ("reset",), ("store", 3), ("close",)):
            before.ask(*command)
        for command in (("use", text), ("open",)):
            now.ask(*command)
        assert now.ask("load") == [3] * 8, store["type"]
        now.ask("close")
    before.end()
    now.end()

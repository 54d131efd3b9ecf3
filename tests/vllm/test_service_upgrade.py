"""Two real vLLM servers at one service, killed, restarted and upgraded under load: every output is that of vLLM alone,
every request is answered, and hits come after each restart."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Condition, Thread
from typing import Any

import httpx
import pytest
import yaml
from engines import BLOCK, VOCABULARY, stack
from support_api_server import ApiServer, Release, Said
from support_manager import Manager
from support_service import until

pytestmark = [pytest.mark.engine, pytest.mark.long]
SECONDS = 600.0
NEXT = "NEXT_VLLM"
"""Names the folder of the next release, which `overlay.py` makes."""
SYSTEMS, SYSTEM_BLOCKS = 4, 3
CONVERSATIONS, TURNS, TOKENS = 48, 4, 8
ROWS = 256
"""Fewer than the blocks of the conversations of one release."""
CLIENTS = 3
"""Of each server."""
CLOSEST = 1e-3
"""A conversation with a token that is less ahead than that is left out: batches differ in their last bits."""
NEAR = 1e-3
"""How much a log-probability may differ."""
LONGEST_SECONDS = 60.0
"""A request that takes longer hangs. One waits ten seconds for the disk at most."""
PAUSE = 40
"""Answers of each server between two restarts."""


@dataclass
class Conversation:
    """The prompts of its turns, each beginning with what was said before, and the right answers by release."""

    prompts: list[list[int]]
    right: dict[str, list[Said]] = field(default_factory=dict)

    def differs(self, turn: int, release: str, said: Said) -> str:
        """How an answer differs from the right one; empty if it does not."""
        right = self.right[release][turn]
        drift = max(abs(one - other) for one, other in zip(said.logprobs, right.logprobs, strict=True))
        if said.tokens == right.tokens and drift < NEAR:
            return ""
        return f"{said}, not {right}, by {drift:g}"


def hold(server: ApiServer, seed: int) -> list[Conversation]:
    """Conversations with a server, some with the same system prompt. Its answers are part of the prompts after."""
    rng = random.Random(seed)

    def words(length: int) -> list[int]:
        return [rng.randrange(3, VOCABULARY) for _ in range(length)]

    systems = [words(SYSTEM_BLOCKS * BLOCK) for _ in range(SYSTEMS)]
    held = [Conversation([systems[at % SYSTEMS] + words(rng.randrange(160, 250))]) for at in range(CONVERSATIONS)]
    for turn in range(TURNS):
        for one, said in zip(held, answers(server, held, turn), strict=True):
            one.right.setdefault(server.release, []).append(said)
            if turn + 1 < TURNS:
                one.prompts.append(one.prompts[-1] + said.tokens + words(rng.randrange(100, 200)))
    return held


def repeat(server: ApiServer, held: Sequence[Conversation]) -> None:
    """Have another release say what it says to the same prompts."""
    for turn in range(TURNS):
        for one, said in zip(held, answers(server, held, turn), strict=True):
            one.right.setdefault(server.release, []).append(said)


def answers(server: ApiServer, held: Sequence[Conversation], turn: int) -> list[Said]:
    with ThreadPoolExecutor(2 * CLIENTS) as pool:
        return list(pool.map(lambda one: server.ask(one.prompts[turn], TOKENS), held))


class Load:
    """Clients of servers that come and go. `failures` ends the test; `cut` are requests whose server was killed."""

    def __init__(self, servers: Sequence[ApiServer], held: Sequence[Conversation], seed: int) -> None:
        self.failures: list[str] = []
        self.answered: Counter[str] = Counter()
        self.cached: Counter[str] = Counter()
        self.cut = 0
        self.longest_seconds = 0.0
        self.held, self._changed, self._ended = held, Condition(), False
        self._lives = dict.fromkeys((server.name for server in servers), 0)
        """Which life a server is in that is asked; 0: it is not asked."""
        self._next_life = 1
        self._killed: set[int] = set()
        self._in_flight: Counter[str] = Counter()
        self._threads = [
            Thread(target=self._run, args=(server, random.Random(f"{seed} {server.name} {number}")))
            for server in servers
            for number in range(CLIENTS)
        ]
        for thread in self._threads:
            thread.start()

    def resume(self, server: ApiServer) -> None:
        """The server is up."""
        with self._changed:
            self._lives[server.name], self._next_life = self._next_life, self._next_life + 1
            self._changed.notify_all()

    def kill(self, server: ApiServer) -> None:
        """The server is about to be killed: what it does not answer from here on is no failure."""
        with self._changed:
            self._killed.add(self._lives[server.name])
            self._lives[server.name] = 0

    def drain(self, server: ApiServer) -> None:
        """Ask the server nothing more, and wait for all answers: vLLM 0.32 would not end while it owes one."""
        with self._changed:
            self._lives[server.name] = 0
        self.until(lambda: not self._in_flight[server.name], "all requests are answered")

    def end(self) -> None:
        """Have all clients end, once their last requests are answered."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def until(self, true: Callable[[], object], what: str, seconds: float = 300.0) -> None:
        """Wait for a condition, or the first failure."""
        until(lambda: self.failures or true(), what, seconds)
        assert not self.failures, "\n".join(self.failures)

    def _run(self, server: ApiServer, rng: random.Random) -> None:
        try:
            while not (self._ended or self.failures):
                one = rng.choice(self.held)
                for turn in range(TURNS):
                    if not self._ask(server, one, turn):
                        break
        except Exception as error:
            self.failures.append(f"{server.name}: {error!r}")

    def _ask(self, server: ApiServer, one: Conversation, turn: int) -> bool:
        """One request, once the server is up. False where it got no answer, or the load has ended."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or self._lives[server.name])
            if self._ended:
                return False
            life, release = self._lives[server.name], server.release
            self._in_flight[server.name] += 1
        begun = time.monotonic()
        try:
            said = server.ask(one.prompts[turn], TOKENS)
        except httpx.HTTPError as error:
            with self._changed:
                if life not in self._killed:
                    self.failures.append(f"{server.name} did not answer: {error!r}\n{server.tail()}")
                self.cut += 1
            return False
        finally:
            with self._changed:
                self._in_flight[server.name] -= 1
        differs = one.differs(turn, release, said)
        with self._changed:
            if differs:
                self.failures.append(f"{server.name}, {release}, life {life}, turn {turn}: {differs}")
            self.answered[server.name] += 1
            self.cached[server.name] += said.cached
            self.longest_seconds = max(self.longest_seconds, time.monotonic() - begun)
        return True


class Events:
    """What happens to two servers and their service. `done` has the hits after each event by its kind: tokens of one
    prompt on a server that was started, tokens of the load on each server where the service was."""

    def __init__(
        self, servers: Sequence[ApiServer], releases: Sequence[Release], manager: Manager, load: Load, seed: int
    ) -> None:
        self._servers, self._releases, self._manager, self._load = servers, releases, manager, load
        self.done: dict[str, list[str]] = {}
        self.found_again: list[int] = []
        """Blocks that each start of the service has found in the rows of before."""
        self._is_kept = False
        self._rng = random.Random(seed)

    def run(self, seconds: float) -> None:
        """Each kind once in any order, then again, until the time is over."""
        kinds: dict[str, Callable[[], str]] = {
            "server killed": partial(self._server, signal.SIGKILL),
            "server restarted": partial(self._server, signal.SIGTERM),
            "server upgraded": partial(self._server, signal.SIGTERM, upgrade=True),
            "service killed": partial(self._service, signal.SIGKILL),
            "service restarted": partial(self._service, signal.SIGTERM),
            "service stopped": partial(self._service, signal.SIGTERM, keep=False),
            "both killed": self._both,
        }
        if len(self._releases) == 1:
            del kinds["server upgraded"]
        begun = time.monotonic()
        while time.monotonic() < begun + seconds:
            for kind in self._rng.sample(sorted(kinds), len(kinds)):
                self._wait_for_load()
                at = time.monotonic() - begun
                said = kinds[kind]()
                self.done.setdefault(kind, []).append(said)
                print(f"{at:4.0f} s: {kind}: {said}; {time.monotonic() - begun - at:.1f} s", flush=True)
        self._wait_for_load()

    def close(self) -> None:
        """End the service, with what it has said."""
        self._end_service(signal.SIGTERM)

    def _wait_for_load(self) -> None:
        before = Counter(self._load.answered)
        names = [server.name for server in self._servers]
        self._load.until(
            lambda: all(self._load.answered[name] >= before[name] + PAUSE for name in names), "the servers answer"
        )

    def _server(self, number: int, *, upgrade: bool = False) -> str:
        server = self._rng.choice(self._servers)
        release = next(one for one in self._releases if (one.name == server.release) != upgrade)
        if number == signal.SIGKILL:
            self._load.kill(server)
        else:
            self._load.drain(server)
        server.end(number)
        return self._start(server, release)

    def _start(self, server: ApiServer, release: Release) -> str:
        server.start(release)
        hits = self._first_hits(server)
        self._load.resume(server)
        return f"{server.name} with {release.name}: {hits} tokens"

    def _first_hits(self, server: ApiServer) -> int:
        """Cached tokens of the first prompt that has any of its own conversation: others have stored them, because no
        conversation is tried twice."""
        for one in self._rng.sample(self._load.held, len(self._load.held)):
            said = server.ask(one.prompts[-1], TOKENS)
            assert not (differs := one.differs(TURNS - 1, server.release, said)), f"{server.name}: {differs}"
            if said.cached > SYSTEM_BLOCKS * BLOCK:
                return said.cached
        raise AssertionError(f"{server.name} has no hits after its start:\n{server.tail()}")

    def _service(self, number: int, *, keep: bool = True) -> str:
        self._end_service(number)
        if not keep:
            self._manager.drop()
        self._is_kept = keep
        before = {server.name: server.hits() for server in self._servers}
        self._manager.start()
        return self._later_hits(before)

    def _end_service(self, number: int) -> None:
        said = self._manager.end(number)
        found = re.search(r"(\d+) blocks of the process before are found", said)
        if self._is_kept:
            assert found, said
            self.found_again.append(int(found[1]))

    def _later_hits(self, before: dict[str, float]) -> str:
        """Hits of the servers under load that have gone on; each connects again by itself."""
        now = dict(before)

        def all_hit() -> bool:
            for server in self._servers:
                if server.name in before:
                    now[server.name] = server.hits()
            return all(now[name] > before[name] for name in before)

        self._load.until(all_hit, "hits of the next service")
        return ", ".join(f"{name}: {now[name] - before[name]:.0f} tokens" for name in before)

    def _both(self) -> str:
        server = self._rng.choice(self._servers)
        release = next(one for one in self._releases if one.name == server.release)
        self._load.kill(server)
        server.end(signal.SIGKILL)
        self._end_service(signal.SIGKILL)
        self._is_kept = True
        before = {each.name: each.hits() for each in self._servers if each is not server}
        self._manager.start()
        started = self._start(server, release)
        return f"{started}; {self._later_hits(before)}"


@contextmanager
def loaded(
    servers: Sequence[ApiServer], held: Sequence[Conversation], releases: Sequence[Release], seed: int
) -> Iterator[Load]:
    """Both servers under load, the first of the first release, the second of the last."""
    load = Load(servers, held, seed)
    try:
        for server, release in zip(servers, (releases[0], releases[-1]), strict=True):
            server.start(release)
            load.resume(server)
        yield load
    except BaseException:
        for server in servers:
            server.close()
        raise
    finally:
        load.end()


def right_answers(
    model: Path, folder: Path, releases: Sequence[Release], seed: int, **options: Any
) -> list[Conversation]:
    """Conversations that each release without kvtier has held."""
    held: list[Conversation] = []
    with closing(ApiServer(model, folder, "alone", **options)) as server:
        for release in releases:
            server.start(release)
            if held:
                repeat(server, held)
            else:
                held = hold(server, seed)
            server.end(signal.SIGTERM)
    kept = [one for one in held if min(said.margin for told in one.right.values() for said in told) > CLOSEST]
    assert len(kept) > CONVERSATIONS / 2
    return kept


@pytest.mark.timeout(3600)
def test_servers_at_one_service_are_killed_restarted_and_upgraded_under_load(
    models, root, tmp_path, short_folder, seed
):
    options: dict[str, Any] = {"max_model_len": 2048, "num_gpu_blocks_override": 48}
    path, file = f"{short_folder}/service", tmp_path / "stack.yaml"
    file.write_text(yaml.safe_dump(stack(root, ROWS)))
    ours = {"spec_name": "KVTierSpec", "spec_module_path": "kvtier.engines.vllm", "service": path}
    ours["offload_prompt_only"] = False
    connector = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": ours}
    following = os.environ.get(NEXT, "")
    with ExitStack() as opened:
        releases = [
            opened.enter_context(closing(Release(folder, tmp_path / f"release-{at}.log")))
            for at, folder in enumerate(["", following] if following else [""])
        ]
        print("releases", *(release.name for release in releases))
        assert len({release.name for release in releases}) == len(releases)
        held = right_answers(models["llama"], tmp_path, releases, seed, **options)
        options["kv_transfer_config"] = connector
        servers = [
            opened.enter_context(closing(ApiServer(models["llama"], tmp_path, name, **options))) for name in "AB"
        ]
        with Manager(file, path) as manager, loaded(servers, held, releases, seed) as load:
            events = Events(servers, releases, manager, load, seed)
            events.run(SECONDS)
            load.end()
            events.close()
    print({kind: len(done) for kind, done in events.done.items()}, "blocks found in rows:", events.found_again)
    print(
        f"{len(held)} conversations, answered {dict(load.answered)}, cached tokens {dict(load.cached)}, cut {load.cut},"
    )
    print(f"the longest request {load.longest_seconds:.1f} s")
    assert not load.failures
    assert all(events.found_again)
    assert load.longest_seconds < LONGEST_SECONDS
    if not following:
        pytest.skip(f"all of it but upgrades: {NEXT} names no folder of the next vLLM (tests/vllm/overlay.py)")

"""An engine over a tier on a server that is stopped, killed or emptied, is reached over a bad network, or is full."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

from faults.machine.tcp_proxy import ProxyFaults, StreamFaults, TcpProxy

from ..attack import Attack, Budget, Tally
from ..driven import CLOSE_SECONDS, PAGE_BYTES, Engine, engine_over
from ..machine.belongings import belongings, left_behind
from ..remote.server import JOB_SECONDS, RemoteServer, Start, valkey, without_valkey
from .disks import SHORT_PAUSE_SECONDS, judge_bytes, recovered

HANG_SECONDS = 1.0
"""An engine's call that takes longer counts as a hang; a healthy one takes less than a thousandth of it."""
HEALTHY_REQUESTS = 20
HAPPENED_SECONDS = 30.0
PATIENT = {"request_timeout_seconds": 5.0, "job_timeout_seconds": 8.0}
"""Where nothing has to be late: a busy machine needs more than 0.3 s for a connection at times."""
BOUND_BYTES = 16 << 20
FEW_BLOCKS_BYTES = (2 << 20) + 20 * PAGE_BYTES
"""Room for about 20 blocks beside what an empty server needs."""


@dataclass(slots=True)
class Scene:
    """An engine at work. What `to_the_end` holds is undone once the stack is closed."""

    server: RemoteServer
    proxy: TcpProxy
    engine: Engine
    to_the_end: ExitStack
    recovers: bool = True


Fault = Callable[[Scene], None]


def killed(scene: Scene) -> None:
    scene.server.kill()
    scene.engine.run(seconds=JOB_SECONDS)
    scene.server.start()


def killed_to_the_end(scene: Scene) -> None:
    scene.server.kill()
    scene.recovers = False
    scene.engine.run(seconds=JOB_SECONDS)


def frozen(scene: Scene, seconds: float) -> None:
    with scene.server.frozen():
        scene.engine.run(seconds=seconds)


def frozen_to_the_end(scene: Scene) -> None:
    scene.to_the_end.enter_context(scene.server.frozen())
    scene.recovers = False
    scene.engine.run(seconds=JOB_SECONDS)


def emptied(scene: Scene) -> None:
    for _ in range(8):
        scene.server.empty()
        scene.engine.run(requests=4)


def linked(scene: Scene, link: ProxyFaults) -> None:
    happened = scene.proxy.happened.total()
    with scene.proxy.during(link):
        if link.refuse:
            scene.proxy.disconnect()
        scene.engine.run(seconds=JOB_SECONDS)
        if not link.refuse and link != SLOW_LINK:  # one message in a hundred may take longer on a busy machine
            waited = scene.engine.run_until(lambda: scene.proxy.happened.total() > happened, HAPPENED_SECONDS)
            assert waited is not None, "the network was as always"


SLOW_LINK = ProxyFaults(to_client=StreamFaults(bytes_per_second=1 << 20))
STOPS: dict[str, Fault] = {
    "killed and started again": killed,
    "frozen past a job's deadline": partial(frozen, seconds=JOB_SECONDS + 1.0),
    "emptied again and again": emptied,
    "frozen to the end": frozen_to_the_end,
    "frozen for 1 s": partial(frozen, seconds=1.0),
    "killed for good": killed_to_the_end,
}
LINKS: dict[str, Fault] = {
    name: partial(linked, link=link)
    for name, link in {
        "without a word": ProxyFaults(half_open=True),
        "300 ms more in 1 %": ProxyFaults(to_client=StreamFaults(delay_seconds=0.3, delayed_share=0.01)),
        "1 MiB/s": SLOW_LINK,
        "stalled within a value": ProxyFaults(to_client=StreamFaults(stall_after=PAGE_BYTES // 2)),
        "30 ms more": ProxyFaults(to_client=StreamFaults(delay_seconds=0.03)),
        "refused": ProxyFaults(refuse=True),
    }.items()
}


@contextmanager
def scene_of(tally: Tally, server: RemoteServer, seed: int, what: str, **times: float) -> Iterator[Scene]:
    """An engine over a tier on a server, filled; what must hold is judged when it is closed. `times` are options of the
    tier, where the short ones of the server are not what is wanted."""
    with TcpProxy(server.address, seed) as proxy, ExitStack() as to_the_end:
        tier = server.tier(proxy, close_timeout_seconds=CLOSE_SECONDS, **times)
        engine = engine_over(tier, seed=seed, load_seconds=JOB_SECONDS)
        scene = Scene(server, proxy, engine, to_the_end)
        with engine:
            for breaker in engine.breakers:
                breaker.pause_seconds = SHORT_PAUSE_SECONDS
            engine.fill()
            yield scene
        _judge(tally, scene, what)


@contextmanager
def leaving_nothing(tally: Tally, what: str) -> Iterator[None]:
    """One iteration. Afterwards this process has the same open files and threads as before."""
    before = belongings()
    yield
    left = left_behind(before)
    tally.leaks += len(left)
    tally.expect(not left, f"{what}: left behind: {left}")
    tally.iterations += 1


def _judge(tally: Tally, scene: Scene, what: str) -> None:
    engine, seconds = scene.engine, scene.engine.close_seconds
    judge_bytes(tally, engine, what)
    tally.hangs += seconds > 3 * CLOSE_SECONDS + 2.5
    tally.expect(seconds <= 3 * CLOSE_SECONDS + 2.5, f"{what}, policy {engine.policy}: close took {seconds:.1f} s")


def note_calls(tally: Tally, engine: Engine, what: str, when: str) -> None:
    """Note what the engine's calls cost since the last time, and count those that took too long."""
    for call, seconds in engine.felt.seconds.items():
        slow = [one for one in seconds if one > HANG_SECONDS]
        tally.hangs += len(slow)
        tally.expect(not slow, f"{what}: {call} took {slow[:3]} s {when}")
        name = f"microseconds 99 % of {call} calls took {when}, at most"
        tally.notes[name] = max(tally.notes[name], engine.felt.p99_us(call))
    engine.felt.seconds.clear()


def faulty_servers(budget: Budget, start: Start, faults: dict[str, Fault]) -> Tally:
    """Faults in turn; an engine is driven before, meanwhile and after."""
    tally, rng, names = Tally(), random.Random(budget.seed), list(faults)
    for number in range(budget.count):
        name = names[number % len(names)]
        with start(BOUND_BYTES) as server, leaving_nothing(tally, name):
            _round(tally, server, name, faults[name], rng.randrange(1 << 30))
    return tally


def _round(tally: Tally, server: RemoteServer, name: str, fault: Fault, seed: int) -> None:
    with scene_of(tally, server, seed, name) as scene:
        engine = scene.engine
        engine.felt.seconds.clear()
        engine.run(requests=HEALTHY_REQUESTS)
        note_calls(tally, engine, name, "before")
        fault(scene)
        note_calls(tally, engine, name, "meanwhile")
        if scene.recovers:
            server.empty()  # so that there is something to store
            recovered(tally, engine, name)
            held_within_bounds(tally, server, name)
        lower = engine.lower
        tally.notes["blocks loaded from the server"] += lower.loaded
        tally.notes["blocks stored on the server"] += lower.stored
        tally.notes["blocks late, failed or dropped"] += lower.late + lower.failed + sum(lower.dropped.values())


# ---- full


def full_servers(budget: Budget, start: Start) -> Tally:
    """A server with room for about 20 blocks, which evicts or refuses; stores go on, and nothing is held beyond it."""
    tally, rng = Tally(), random.Random(budget.seed)
    for number in range(budget.count):
        policy = ("noeviction", "allkeys-lru")[number % 2]
        with start(FEW_BLOCKS_BYTES, policy) as server, leaving_nothing(tally, policy):
            _full_round(tally, server, policy, rng.randrange(1 << 30))
    return tally


def _full_round(tally: Tally, server: RemoteServer, policy: str, seed: int) -> None:
    with scene_of(tally, server, seed, policy, **PATIENT) as scene:
        engine = scene.engine
        for _ in range(6):
            engine.run(requests=10)
            tally.expect(held_within_bounds(tally, server, policy) > 0, f"{policy}: nothing was stored")
        dropped = engine.lower.dropped.get("disk_full", 0)
        tally.expect((dropped > 0) is (policy == "noeviction"), f"{policy}: {engine.lower}")
        tally.notes["stores dropped, server full"] += dropped
        tally.notes["blocks loaded from the server"] += engine.lower.loaded


def held_within_bounds(tally: Tally, server: RemoteServer, what: str) -> int:
    """The bytes that a server holds of blocks; more than its bound is counted."""
    held = server.held_bytes()
    tally.over_bound += held > server.bound_bytes
    tally.expect(held <= server.bound_bytes, f"{what}: {held} bytes held, {server.bound_bytes} allowed")
    tally.notes["looks at the bound"] += 1
    return held


def _over(start: Start, faults: dict[str, Fault]) -> Callable[[Budget], Tally]:
    return lambda budget: faulty_servers(budget, start, faults)


ATTACKS = (
    Attack(
        "valkey stopped",
        "kill -9, with and without a new start; SIGSTOP for 1 s, past a job's deadline, to the end; FLUSHALL again and "
        "again: an engine goes on, calls of more than 1 s count as hangs",
        2, 300, _over(valkey, STOPS), missing=without_valkey, shards=4,
    ),
    Attack(
        "valkey over a bad network",
        "a TCP proxy: silence, 300 ms more in 1 %, 1 MiB/s, a stall within a value, 30 ms more, refused connections",
        2, 300, _over(valkey, LINKS), missing=without_valkey, shards=4,
    ),
    Attack(
        "valkey full",
        "maxmemory for about 20 blocks, with noeviction and with allkeys-lru, under an engine's stores",
        2, 200, lambda budget: full_servers(budget, valkey), missing=without_valkey, shards=4,
    ),
)  # fmt: skip

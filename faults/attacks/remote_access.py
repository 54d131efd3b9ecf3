"""Servers that may not be used, cannot be found or are not trusted, and processes that fork while a tier is open."""

from __future__ import annotations

import os
import random
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

from kvtier.errors import ConfigError, UsageError
from kvtier_remote.backend import RemoteBackend

from ..attack import Attack, Budget, Tally
from ..driven import CLOSE_SECONDS, Engine, engine_over
from ..machine.child import Child, Line
from ..machine.undo import Machine, run, without_root
from ..remote.pool import without_mooncake
from ..remote.server import JOB_SECONDS, RemoteServer, Start, Valkey, valkey, without_valkey
from .disks import SHORT_PAUSE_SECONDS, judge_bytes, recovered
from .remote import PATIENT, leaving_nothing, note_calls

OPEN_SECONDS = 10.0
"""An opening that cannot succeed ends in a few requests' time; one that takes longer hangs."""
UNHURRIED = {"request_timeout_seconds": 1.0, "job_timeout_seconds": 2.0}
"""For a login, which takes longer than a request on a busy machine."""
FORK_SECONDS = 30.0
SILENT_NAME_SERVER = "127.0.0.77"


def refused(tally: Tally, make: Callable[..., RemoteBackend], what: str, key: str, **changes: Any) -> None:
    """An opening that must end soon, with one line that names the key."""
    engine = engine_over(make(**({"close_timeout_seconds": CLOSE_SECONDS} | changes)))
    begun, problem = time.monotonic(), "it was opened"
    try:
        with engine:
            pass
    except ConfigError as error:
        problem = "" if key in str(error) and "\n" not in str(error) else str(error)
        engine.felt.close()
    seconds = time.monotonic() - begun
    tally.expect(not problem, f"{what}: {problem}")
    tally.hangs += seconds > OPEN_SECONDS
    tally.expect(seconds <= OPEN_SECONDS, f"{what}: opening ended after {seconds:.1f} s")
    tally.notes["milliseconds until an opening was refused, at most"] = max(
        tally.notes["milliseconds until an opening was refused, at most"], int(seconds * 1000)
    )


# ---- users and certificates


def access(budget: Budget) -> Tally:
    """Wrong users at open; then one is taken away while its engine is at work, and given back."""
    tally, rng = Tally(), random.Random(budget.seed)
    for number in range(budget.count):
        password = budget.folder / f"password-{number}"
        password.write_text("sesame")
        password.chmod(0o600)
        wrong = budget.folder / f"wrong-{number}"
        wrong.write_text("open")
        wrong.chmod(0o600)
        with valkey(16 << 20) as server, leaving_nothing(tally, "users"):
            _acl(server, "on", ">sesame", "~*", "+@all")
            user = {"username": "kvtier", "password_file": str(password)}
            for what, other in (("password", {"password_file": str(wrong)}), ("user", {"username": "other"})):
                refused(tally, server.tier, f"another {what}", "password_file", **(user | other | PATIENT))
            refused(tally, server.tier, "a closed port", "servers", servers=["127.0.0.1:1"])
            refused(tally, server.tier, "TLS where there is none", "tls", tls=True)
            _revoked(tally, server, user, rng.randrange(1 << 30))
    return tally


def _acl(server: Valkey, *rules: str) -> None:
    server.server.client.execute_command("ACL", "SETUSER", "kvtier", *rules)


def _revoked(tally: Tally, server: Valkey, user: dict[str, str], seed: int) -> None:
    tier = server.tier(close_timeout_seconds=CLOSE_SECONDS, **(user | UNHURRIED))
    engine = engine_over(tier, seed=seed, load_seconds=JOB_SECONDS)
    with engine:
        for breaker in engine.breakers:
            breaker.pause_seconds = SHORT_PAUSE_SECONDS
        engine.fill()
        engine.felt.seconds.clear()
        _acl(server, "off")
        server.server.client.execute_command("CLIENT", "KILL", "USER", "kvtier")
        failing = engine.run_without_the_lower_tier(JOB_SECONDS)
        tally.expect(failing, f"nothing failed without the user: {engine.lower}")
        note_calls(tally, engine, "no user", "meanwhile")
        _acl(server, "on")
        server.empty()
        recovered(tally, engine, "the user is back")
    judge_bytes(tally, engine, "no user")


def without_tls() -> str | None:
    """Why no server with TLS can be started here, if so."""
    import shutil

    absent = [name for name in ("redis-server", "openssl") if shutil.which(name) is None]
    return without_valkey() or (
        f"needs {' and '.join(absent)}: apt-get install redis-server openssl" if absent else None
    )


def certificates(budget: Budget) -> Tally:
    """Certificates that are not trusted or of another host, at open; then the right one, also over a bad connection."""
    from support_redis import ELSEWHERE, HERE, Authority, redis_server
    from support_valkey import warm_up

    tally = Tally()
    for number in range(budget.count):
        own, foreign = (Authority(budget.folder / f"{name}-{number}") for name in ("own", "foreign"))
        for names, problem in ((HERE, "of another authority"), (ELSEWHERE, "of another host")):
            with redis_server(own, names) as redis:
                server = Valkey(redis, 256 << 20)
                if number == 0 and names == HERE:
                    warm_up(redis)
                redis.client.ping()
                with leaving_nothing(tally, problem):
                    trusted = foreign if names == HERE else own
                    refused(tally, server.tier, problem, "tls", tls={"ca_file": trusted.file})
                    refused(tally, server.tier, "in clear", "tls", tls=False)
                    if names == HERE:
                        _trusted(tally, server, budget.seed + number)
    return tally


def _trusted(tally: Tally, server: Valkey, seed: int) -> None:
    engine = engine_over(server.tier(close_timeout_seconds=CLOSE_SECONDS), seed=seed, load_seconds=JOB_SECONDS)
    with engine:
        engine.fill()
        engine.run(requests=20)
        tally.expect(engine.lower.loaded > 0, f"over TLS nothing was loaded: {engine.lower}")
    judge_bytes(tally, engine, "TLS")


# ---- names


def without_mounts() -> str | None:
    """Why no process can be given another name server here, if so."""
    return without_valkey() or without_root()


def silent_names(budget: Budget) -> Tally:
    """A name server that takes questions and never answers: an opening ends all the same, whatever the engine."""
    tally = Tally()
    resolver = budget.folder / "resolv.conf"
    resolver.write_text(f"nameserver {SILENT_NAME_SERVER}\n")
    engines = [*_unknown_places(budget).items()]
    with Machine(), ExitStack() as undo, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
        silent.bind((SILENT_NAME_SERVER, 53))
        run("mount", "--bind", resolver, "/etc/resolv.conf")
        undo.callback(run, "umount", "/etc/resolv.conf")
        for number in range(budget.count):
            what, (key, tier) = engines[number % len(engines)]
            refused(tally, tier, f"a silent name server, {what}", key, host=f"cache-{number}.example.org")
            silent.setblocking(False)
            with suppress(BlockingIOError):
                while silent.recv(512):
                    tally.notes[f"questions of {what}"] += 1
            tally.expect(tally.notes[f"questions of {what}"] > 0, f"{what}: nothing was asked")
            tally.iterations += 1
    return tally


def _unknown_places(budget: Budget) -> dict[str, tuple[str, Callable[..., RemoteBackend]]]:
    """By engine: the key that a line must name, and what makes a tier on a host."""
    from kvtier_remote import AzureBackend, MooncakeBackend, S3Backend, ValkeyBackend

    secret = budget.folder / "secret"
    secret.write_text("c2VjcmV0")
    secret.chmod(0o600)
    times = {"request_timeout_seconds": 1.0, "job_timeout_seconds": 2.0}
    keys = {"access_key_file": str(secret), "secret_key_file": str(secret)}
    bucket = {"bucket": "kv-cache", "region": "us-east-1", "credentials": keys, "allow_unbounded": True}
    account = {"account": "kvcache", "container": "kv-cache", "credentials": {"account_key_file": str(secret)}}

    def over(kind: Any, place: Callable[[str], dict[str, Any]]) -> Callable[..., RemoteBackend]:
        def make(host: str, **more: Any) -> RemoteBackend:
            tier: RemoteBackend = kind(kind.Options.model_validate(times | more | place(host)))
            return tier

        return make

    found = {
        "valkey": ("servers", over(ValkeyBackend, lambda host: {"servers": [f"{host}:6379"]})),
        "a second server of valkey": (
            "servers",
            over(ValkeyBackend, lambda host: {"servers": ["127.0.0.1:1", f"{host}:6379"]}),
        ),
        "s3": ("endpoint", over(S3Backend, lambda host: bucket | {"endpoint": f"https://{host}:7480"})),
        "azure": (
            "endpoint",
            over(AzureBackend, lambda host: account | {"endpoint": f"https://{host}:7480", "allow_unbounded": True}),
        ),
    }
    if without_mooncake() is None:
        found["mooncake"] = ("master", over(MooncakeBackend, lambda host: {"master": f"{host}:50051"}))
    return found


# ---- forks


def forks(budget: Budget, start: Start) -> Tally:
    """A child may not use the tier, and leaves as asyncio demands of it. Its parent goes on."""
    tally, rng = Tally(), random.Random(budget.seed)
    for _ in range(budget.count):
        with start(16 << 20) as server, leaving_nothing(tally, "fork"):
            _fork_round(tally, server, rng.randrange(1 << 30))
    return tally


def _fork_round(tally: Tally, server: RemoteServer, seed: int) -> None:
    engine = engine_over(server.tier(close_timeout_seconds=CLOSE_SECONDS), seed=seed, load_seconds=JOB_SECONDS)
    with engine:
        engine.fill()
        before = engine.lower.loaded
        _forked(tally, partial(_use, engine))
        engine.run_until(lambda: engine.lower.loaded > before, FORK_SECONDS)
        tally.expect(engine.lower.loaded > before, f"the parent loaded nothing: {engine.lower.dropped}")
    judge_bytes(tally, engine, "fork")


def _use(engine: Engine, line: Line) -> None:
    try:
        engine.run(requests=1)
        line.say("used")
    except UsageError:
        line.say("refused")
    engine.stack.close()
    os._exit(0)


def _forked(tally: Tally, use: Callable[[Line], None]) -> None:
    child = Child(use)
    try:
        child.line.hear("refused")
    except (TimeoutError, RuntimeError) as error:
        tally.hangs += isinstance(error, TimeoutError)
        tally.expect(False, f"the child {error}")
    status = child.ended(20.0)
    tally.hangs += status is None
    tally.expect(status in (0, 70), f"the child ended with {status}")


ATTACKS = (
    Attack(
        "access to valkey",
        "another password, user, port, TLS where there is none: refused with one line; a user turned off under an "
        "engine at work, and on again",
        1, 100, access, missing=without_valkey, shards=2,
    ),
    Attack(
        "certificates of redis",
        "a certificate that is not trusted, or of another host: refused with one line; the right one serves",
        1, 50, certificates, missing=without_tls,
    ),
    Attack(
        "silent name server",
        "a name server that never answers, in a mount namespace of its own, for valkey, a second server of it, s3, "
        "azure and mooncake: an opening ends in time with one line",
        5, 50, silent_names, missing=without_mounts,
    ),
    Attack(
        "fork over valkey",
        "a process forks with a tier open: the child is refused and ends; the parent goes on",
        2, 200, lambda budget: forks(budget, valkey), missing=without_valkey,
    ),
)  # fmt: skip

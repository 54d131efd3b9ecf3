"""TLS to a Redis server: certificates that are trusted no more while an engine works, and bad networks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from faults.machine.tcp_proxy import TcpProxy
from kvtier_remote.backend import RemoteBackend

from ..attack import Attack, Budget, Tally
from ..remote.server import JOB_SECONDS, Valkey
from .remote import LINKS, Fault, Scene, faulty_servers
from .remote_access import forks, without_tls
from .remote_values import bytes_on_the_way


class Secure(Valkey):
    """A server over TLS. A handshake takes a while on a busy machine."""

    def tier(self, through: TcpProxy | None = None, **changes: Any) -> RemoteBackend:
        return super().tier(through, **({"request_timeout_seconds": 1.0, "job_timeout_seconds": 2.0} | changes))


@contextmanager
def redis(folder: Path, bound_bytes: int) -> Iterator[Valkey]:
    """A server that speaks TLS, with an authority of its own."""
    import tempfile

    from support_redis import Authority, redis_server  # to be found inside an attack only
    from support_valkey import warm_up

    place = Path(tempfile.mkdtemp(dir=folder))
    with redis_server(Authority(place / "own"), maxmemory=str(bound_bytes)) as server:
        warm_up(server)
        server.client.ping()
        yield Secure(server, bound_bytes)


def given_certificate(scene: Scene, certificate: tuple[str, str]) -> None:
    """The server has another certificate from now on, and its clients connect anew."""
    client = scene.server.server.client  # type: ignore[attr-defined]
    client.execute_command("CONFIG", "SET", "tls-cert-file", certificate[0], "tls-key-file", certificate[1])
    client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")


def distrusted(scene: Scene, expired: bool) -> None:
    """A certificate that is of another authority, or that has expired; then the right one again."""
    from support_redis import Authority

    authority = scene.server.server.authority  # type: ignore[attr-defined]
    other = authority.issue_expired("old") if expired else Authority(authority.folder / "stranger").issue("server")
    given_certificate(scene, other)
    assert scene.engine.run_without_the_lower_tier(2 * JOB_SECONDS), f"nothing failed: {scene.engine.lower}"
    given_certificate(scene, authority.issue("new"))


FAULTS: dict[str, Fault] = {
    "a certificate of another authority": partial(distrusted, expired=False),
    "a certificate that has expired": partial(distrusted, expired=True),
} | LINKS


def over_tls(budget: Budget) -> Tally:
    """Certificates and links, in turn, under an engine at work; then single bytes."""
    start = partial(redis, budget.folder)
    tally = faulty_servers(budget, start, FAULTS)
    tally.add(bytes_on_the_way(replace(budget, count=12 * budget.count), start))
    return tally


ATTACKS = (
    Attack(
        "redis over TLS",
        "the certificate is replaced by one of another authority or one that has expired, and by a good one again; bad "
        "networks as for valkey; cut, stalled and flipped bytes (12 for each of the others)",
        1, 80, over_tls, missing=without_tls, shards=2,
    ),
    Attack(
        "fork over redis TLS",
        "as over valkey, over TLS",
        2, 60, lambda budget: forks(budget, partial(redis, budget.folder)), missing=without_tls,
    ),
)  # fmt: skip

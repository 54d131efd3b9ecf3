"""What only an object store suffers: users, quotas, keys and certificates that change, stores behind gateways."""

from __future__ import annotations

import random
import secrets
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from faults.machine.tcp_proxy import TcpProxy
from kvtier_remote.backend import RemoteBackend
from kvtier_remote.objects import options

from ..attack import Attack, Budget, Tally
from ..remote.objects import Gateway, bucket, with_ceph, without_ceph
from ..remote.server import JOB_SECONDS
from .remote import BOUND_BYTES, LINKS, STOPS, Fault, Scene, faulty_servers
from .remote_access import refused
from .remote_values import bytes_on_the_way

QUOTA_BLOCKS = 40
DAEMON_STOPS = {name: stop for name, stop in STOPS.items() if name != "emptied again and again"}


def _ceph(scene: Scene) -> Any:
    assert isinstance(scene.server, Gateway)
    return scene.server.bucket.ceph


def _failing(scene: Scene) -> None:
    """Work for a while in which blocks must fail."""
    assert scene.engine.run_without_the_lower_tier(2 * JOB_SECONDS), f"nothing failed: {scene.engine.lower}"


# ---- users and quotas


def suspended(scene: Scene) -> None:
    """The user is suspended, and enabled again."""
    admin = _ceph(scene).admin
    admin("user", "suspend", "--uid=kv")
    try:
        _failing(scene)
    finally:
        admin("user", "enable", "--uid=kv")


def full(scene: Scene) -> None:
    """A quota of a few blocks more than there are: the rest is dropped, and loads go on."""
    engine, admin = scene.engine, _ceph(scene).admin
    of_bucket = ("--quota-scope=bucket", f"--bucket={scene.server.bucket.name}", "--uid=kv")  # type: ignore[attr-defined]
    scene.server.empty()
    admin("quota", "set", *of_bucket, f"--max-objects={QUOTA_BLOCKS}")
    admin("quota", "enable", *of_bucket)
    dropped, loaded = engine.lower.dropped.get("disk_full", 0), engine.lower.loaded
    engine.run(requests=60)
    assert engine.lower.dropped.get("disk_full", 0) > dropped, f"nothing was dropped: {engine.lower}"
    assert engine.lower.loaded > loaded, f"a full bucket was not read any more: {engine.lower}"
    admin("quota", "disable", *of_bucket)


# ---- keys that expire


class Renewed(Gateway):
    """Tiers use a key in files, which is taken away and replaced."""

    files: ClassVar[dict[str, Path]]
    _key = ""

    def tier(self, through: TcpProxy | None = None, connections: int = 0, **changes: Any) -> RemoteBackend:
        if not self._key:
            self.renew()
        keys = {name: str(file) for name, file in self.files.items()}
        return super().tier(through, connections, **({"credentials": keys} | changes))

    def renew(self) -> None:
        """Another key in the files."""
        self._key, secret = f"AKID{secrets.token_hex(8).upper()}", secrets.token_hex(16)
        self.bucket.ceph.admin("key", "create", "--uid=kv", f"--access-key={self._key}", f"--secret={secret}")
        for file, text in zip(self.files.values(), (self._key, secret), strict=True):
            file.write_text(text)
            file.chmod(0o600)

    def expire(self) -> None:
        """The key in the files is valid no more."""
        self.bucket.ceph.admin("key", "rm", "--uid=kv", f"--access-key={self._key}")


def expired(scene: Scene) -> None:
    """The key becomes invalid; a new one is in the files only later."""
    server = scene.server
    assert isinstance(server, Renewed)
    server.expire()
    _failing(scene)
    server.renew()


# ---- certificates


def distrusted(scene: Scene, folder: Path) -> None:
    """The gateway starts with a certificate of another authority, and then with its own again."""
    from support_redis import Authority  # to be found inside an attack only

    ceph = _ceph(scene)
    own, place = ceph.certificate, folder / f"stranger-{scene.proxy.port}"
    try:
        ceph.kill()
        ceph.certificate = Authority(place).issue("gateway")
        ceph.start()
        _failing(scene)
    finally:
        ceph.kill()
        ceph.certificate = own
        ceph.start()


def certificates(tally: Tally, ceph: Any, budget: Budget) -> None:
    """A certificate that is not trusted keeps a tier from opening."""
    from support_redis import Authority

    stranger = {"ca_file": Authority(budget.folder / "other").file}
    with bucket(ceph, BOUND_BYTES, secure=True) as server:
        for what, trusted in (("an unknown authority", {"ca_file": None}), ("another authority", stranger)):
            refused(tally, server.tier, what, "ca_file", **trusted)


# ---- the attacks


def users(ceph: Any, budget: Budget) -> Tally:
    """A user without rights or without room, and keys that expire, under an engine at work; before that wrong ones."""
    tally = Tally()
    with bucket(ceph, BOUND_BYTES) as server:
        wrong = budget.folder / "wrong"
        wrong.write_text("open")
        wrong.chmod(0o600)
        keys = {"access_key_file": str(ceph.folder / "key-id"), "secret_key_file": str(wrong)}
        refused(tally, server.tier, "another secret", "credentials", credentials=keys)
        refused(tally, server.tier, "another bucket", "bucket", bucket="nobody-has-it")
        refused(tally, server.tier, "a closed port", "endpoint", endpoint="http://127.0.0.1:1")
    faults: dict[str, Fault] = {"suspended": suspended, "quota exceeded": full}
    tally.add(faulty_servers(budget, partial(bucket, ceph), faults))
    return tally


def keys_that_expire(ceph: Any, budget: Budget) -> Tally:
    """Keys in files, which are read again."""
    options.RENEW_SECONDS = 0.2
    Renewed.files = {name: budget.folder / name for name in ("access_key_file", "secret_key_file")}

    return faulty_servers(budget, partial(bucket, ceph, kind=Renewed), {"the key expires and is renewed": expired})


def tls(ceph: Any, budget: Budget) -> Tally:
    """Certificates at open and later, and what bad networks do to TLS: links, and single bytes."""
    tally, start = Tally(), partial(bucket, ceph, secure=True)
    certificates(tally, ceph, budget)
    faults: dict[str, Fault] = {"trusted no more": partial(distrusted, folder=budget.folder)} | LINKS
    tally.add(faulty_servers(budget, start, faults))
    tally.add(bytes_on_the_way(replace(budget, count=12 * budget.count), start))
    return tally


def daemons(ceph: Any, budget: Budget) -> Tally:
    """The store and the monitor behind the gateway, in turn."""
    tally, rng = Tally(), random.Random(budget.seed)
    for number in range(budget.count):
        daemon = ("osd", "mon")[number % 2]
        name = list(DAEMON_STOPS)[number // 2 % len(DAEMON_STOPS)]
        part = replace(budget, count=1, seed=rng.randrange(1 << 30))
        found = faulty_servers(part, partial(bucket, ceph, daemon=daemon), {f"{daemon} {name}": DAEMON_STOPS[name]})
        tally.add(found)
        tally.notes[f"blocks late, failed or dropped, {daemon} stopped"] += found.notes[
            "blocks late, failed or dropped"
        ]
    return tally


ATTACKS = (
    Attack(
        "access to s3",
        "another secret, bucket, port: refused with one line; a user suspended, and a quota of 40 objects exceeded, "
        "under an engine at work, and taken back",
        2, 40, with_ceph(users), minutes=5, missing=without_ceph,
    ),
    Attack(
        "expired keys of s3",
        "an access key in files becomes invalid under an engine at work; a new one is in the files later",
        1, 20, with_ceph(keys_that_expire), minutes=5, missing=without_ceph,
    ),
    Attack(
        "certificates of s3",
        "HTTPS to the gateway: certificates that are not trusted refuse an opening with one line; the gateway starts "
        "anew with one of another authority, and with its own; bad networks, and single bytes cut, stalled or flipped",
        7, 70, with_ceph(tls), minutes=8, missing=without_ceph,
    ),
    Attack(
        "stores and monitors of ceph",
        "the OSD and the monitor behind the gateway, in turn: kill -9, with and without a new start, SIGSTOP for 1 s, "
        "past a job's deadline, to the end",
        10, 60, with_ceph(daemons, "bluestore"), minutes=8, missing=without_ceph,
    ),
)  # fmt: skip

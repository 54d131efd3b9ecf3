"""The S3 gateway of a Ceph cluster as a server to attack; a bucket each."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from kvtier.testing import TcpProxy
from kvtier_remote.backend import RemoteBackend

REQUEST_SECONDS = 1.0
JOB_SECONDS = 3.0
UNBOUNDED = 1 << 62


class Gateway:
    """A bucket, and the gateway before it. `daemon` is what is stopped; tiers speak TLS with `secure`."""

    bound_bytes = UNBOUNDED

    def __init__(self, bucket: Any, daemon: str, secure: bool) -> None:
        self.bucket = bucket
        self._where = bucket.ceph.over_tls if secure else {"endpoint": bucket.ceph.endpoint}
        self.frozen = partial(bucket.ceph.frozen, daemon)
        self.kill = partial(bucket.ceph.kill, daemon)
        self.start = partial(bucket.ceph.start, daemon)

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self._where["endpoint"].rpartition("/")[2].rpartition(":")
        return host, int(port)

    def tier(self, through: TcpProxy | None = None, connections: int = 0, **changes: Any) -> RemoteBackend:
        times = {"request_timeout_seconds": REQUEST_SECONDS, "job_timeout_seconds": JOB_SECONDS}
        hints = {"miss_hint_seconds": 0.2, "hit_hint_seconds": 2.0}
        where = self._where
        if through is not None:
            where = where | {"endpoint": f"{where['endpoint'].partition(':')[0]}://{through.address}"}
        return self.bucket.tier(**(times | hints | where | changes))  # type: ignore[no-any-return]

    def empty(self) -> None:
        for name in self._names("kvtier/b/"):
            self.remove(name)

    def _names(self, prefix: str) -> list[str]:
        from support_objects import names  # to be found inside an attack only

        return names(self.bucket.store, prefix)

    def blocks(self) -> list[str]:
        return self._names("kvtier/b/")

    def markers(self) -> list[str]:
        return self._names("kvtier/m/")

    def read(self, name: str) -> bytes:
        from support_objects import read

        return read(self.bucket.store, name)

    def write(self, name: str, value: bytes) -> None:
        from support_objects import write

        write(self.bucket.store, name, value)

    def remove(self, name: str) -> None:
        import obstore

        obstore.delete(self.bucket.store, name)

    def held_bytes(self) -> int:
        return len(self.blocks())


@contextmanager
def bucket(
    ceph: Any, bound_bytes: int = 0, *, daemon: str = "gateway", secure: bool = False, kind: type[Gateway] = Gateway
) -> Iterator[Gateway]:
    """A new bucket of a cluster; a daemon that an attack has killed is started again afterwards."""
    from support_ceph import Bucket
    from support_objects import warm_up

    one = Bucket(ceph)
    warm_up(one.store)
    try:
        yield kind(one, daemon, secure)
    finally:
        if ceph.daemons[daemon].poll() is not None:
            ceph.start(daemon)


def without_ceph() -> str | None:
    """Why no gateway can be started here, if so."""
    absent = [name for name in ("radosgw", "ceph-mon", "ceph-osd", "openssl") if shutil.which(name) is None]
    return f"needs Ceph: apt-get install --no-install-recommends {' '.join(absent)}" if absent else None

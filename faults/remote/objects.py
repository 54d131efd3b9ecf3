"""Object stores as servers to attack: the gateway of a Ceph cluster, and Azure's emulator; a bucket each."""

from __future__ import annotations

import os
import shutil
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from faults.machine.tcp_proxy import TcpProxy
from kvtier.aio.boot_clock import read_boot_clock
from kvtier.cli.temporary_folders import temporary_folder
from kvtier_remote.backend import RemoteBackend
from kvtier_remote.write_budget import BudgetFile

from ..attack import Budget, Tally

REQUEST_SECONDS = 1.0
JOB_SECONDS = 3.0
SHARES_IN_A_DAY = 24
ROUND_SHARES = 8
"""A round stores what its server is to hold this many times over, at most: it is emptied again and again."""
REMOVAL_PAUSES_SECONDS = (0.1, 0.5, 2.0)


class ObjectServer(ABC):
    """A bucket, and the service before it. Each of its tiers may write an hour's share at once, and fills up again over
    the day: that bounds what is stored, as the tier's options say it does."""

    def __init__(self, share_bytes: int, folder: str) -> None:
        self._share_bytes = share_bytes
        self._opened_at: list[float] = []
        self._folder = Path(folder)

    # -- what a service has of its own ---------------------------------------------------------------------------

    @property
    @abstractmethod
    def store(self) -> Any:
        """The bucket from outside, over connections of its own, which end with it."""

    @property
    @abstractmethod
    def endpoint(self) -> str:
        """Where tiers connect."""

    @abstractmethod
    def make(self, **options: Any) -> RemoteBackend:
        """A tier in this bucket."""

    @abstractmethod
    def frozen(self) -> AbstractContextManager[None]:
        """It does not run for a while."""

    @abstractmethod
    def kill(self) -> None:
        """SIGKILL."""

    @abstractmethod
    def start(self) -> None:
        """Again, where it was."""

    # -- as all servers ------------------------------------------------------------------------------------------

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.endpoint.partition("//")[2].partition("/")[0].rpartition(":")
        return host, int(port)

    def tier(self, through: TcpProxy | None = None, connections: int = 0, **changes: Any) -> RemoteBackend:
        times = {"request_timeout_seconds": REQUEST_SECONDS, "job_timeout_seconds": JOB_SECONDS}
        hints = {"miss_hint_seconds": 0.2, "hit_hint_seconds": 2.0}
        given = times | hints | self._budget() | {"endpoint": self.endpoint} | changes
        if through is not None:
            host, port = self.address
            given["endpoint"] = str(given["endpoint"]).replace(f"{host}:{port}", through.address)
        return self.make(**given)

    def _budget(self) -> dict[str, Any]:
        """A write budget whose bucket is full, as after an hour without work."""
        folder = self._folder / str(len(self._opened_at))
        file, clock = BudgetFile(str(folder / "tier.budget")), read_boot_clock()
        assert file.open()
        file.write(clock, clock.now_ns(), self._share_bytes)
        file.close()
        self._opened_at.append(time.monotonic())
        budget = {"write_bytes_per_day": SHARES_IN_A_DAY * self._share_bytes, "state_folder": str(folder)}
        return {"name": "tier", "expire_days": 3} | budget

    @property
    def bound_bytes(self) -> int:
        """What its tiers may have written by now."""
        fills = (SHARES_IN_A_DAY - 1) * self._share_bytes / 86_400
        now = time.monotonic()
        return sum(self._share_bytes + int(fills * (now - at)) for at in self._opened_at)

    def _listed(self, prefix: str) -> dict[str, int]:
        """Names and sizes."""
        import obstore

        return {one["path"]: one["size"] for some in obstore.list(self.store, prefix) for one in some}

    def blocks(self) -> list[str]:
        return sorted(self._listed("kvtier/b/"))

    def markers(self) -> list[str]:
        return sorted(self._listed("kvtier/m/"))

    def held_bytes(self) -> int:
        """The sizes of all objects, as the service states them."""
        return sum(self._listed("kvtier/b/").values())

    def read(self, name: str) -> bytes:
        from support_objects import read  # to be found inside an attack only

        return read(self.store, name)

    def write(self, name: str, value: bytes) -> None:
        from support_objects import write

        write(self.store, name, value)

    def remove(self, name: str) -> None:
        """Again where the service answers with an error of its own, which says nothing of the tier: Ceph's gateway does
        so now and then (a DeleteObjects of one name, whose result is UnknownError). Raises it after the last time."""
        import obstore
        from obstore.exceptions import GenericError

        for pause_seconds in (*REMOVAL_PAUSES_SECONDS, None):
            try:
                obstore.delete(self.store, name)
            except FileNotFoundError:  # an earlier try has removed it
                return
            except GenericError as error:
                if pause_seconds is None:
                    raise
                print(f"{name} was not removed from outside, tried again: {error}", file=sys.stderr)
                time.sleep(pause_seconds)
            else:
                return

    def empty(self) -> None:
        for name in self.blocks():
            self.remove(name)


class Gateway(ObjectServer):
    """A bucket of a Ceph cluster. `daemon` is what is stopped; tiers speak TLS with `secure`."""

    def __init__(self, bucket: Any, daemon: str, secure: bool, *budget: Any) -> None:
        super().__init__(*budget)
        self.bucket = bucket
        self._daemon = daemon
        self._where = bucket.ceph.over_tls if secure else {"endpoint": bucket.ceph.endpoint}

    @property
    def store(self) -> Any:
        return self.bucket.store

    @property
    def endpoint(self) -> str:
        return str(self._where["endpoint"])

    def make(self, **options: Any) -> RemoteBackend:
        return self.bucket.tier(**(self._where | options))  # type: ignore[no-any-return]

    def frozen(self) -> AbstractContextManager[None]:
        return self.bucket.ceph.frozen(self._daemon)  # type: ignore[no-any-return]

    def kill(self) -> None:
        self.bucket.ceph.kill(self._daemon)

    def start(self) -> None:
        self.bucket.ceph.start(self._daemon)


class Emulator(ObjectServer):
    """A container of Azure's emulator. It writes its index every 5 s: a killed one has forgotten what came after that,
    be it the container."""

    def __init__(self, container: Any, *budget: Any) -> None:
        super().__init__(*budget)
        self.container = container

    @property
    def store(self) -> Any:
        return self.container.store

    @property
    def endpoint(self) -> str:
        return str(self.container.azurite.endpoint)

    def make(self, **options: Any) -> RemoteBackend:
        return self.container.tier(**options)  # type: ignore[no-any-return]

    def frozen(self) -> AbstractContextManager[None]:
        return self.container.azurite.frozen()  # type: ignore[no-any-return]

    def kill(self) -> None:
        self.container.azurite.stop()

    def start(self) -> None:
        self.container.azurite.start()
        self.container.create()


@contextmanager
def bucket(
    ceph: Any, bound_bytes: int, *, daemon: str = "gateway", secure: bool = False, kind: type[Gateway] = Gateway
) -> Iterator[Gateway]:
    """A new bucket of a cluster; daemons that an attack has killed are started again afterwards."""
    from support_ceph import Bucket  # to be found inside an attack only
    from support_objects import warm_up

    with temporary_folder("kvtier-budget-") as folder:
        server = kind(Bucket(ceph), daemon, secure, ROUND_SHARES * bound_bytes, folder)
        warm_up(server.store)
        try:
            yield server
        finally:
            if ceph.daemons[daemon].poll() is not None:
                ceph.start(daemon)


@contextmanager
def container(azurite: Any, bound_bytes: int) -> Iterator[Emulator]:
    """A new container of an emulator, which is started again afterwards if an attack has killed it."""
    from support_azurite import Container
    from support_objects import warm_up

    with temporary_folder("kvtier-budget-") as folder:
        server = Emulator(Container(azurite), ROUND_SHARES * bound_bytes, folder)
        warm_up(server.store)
        try:
            yield server
        finally:
            if azurite.process.poll() is not None:
                azurite.start()


def with_ceph(attack: Callable[[Any, Budget], Tally], objectstore: str = "memstore") -> Callable[[Budget], Tally]:
    """The attack on a cluster of its own."""

    def run(budget: Budget) -> Tally:
        from support_ceph import ceph_cluster  # to be found inside an attack only

        with ceph_cluster(objectstore) as ceph:
            return attack(ceph, budget)

    return run


def without_ceph() -> str | None:
    """Why no gateway can be started here, if so."""
    absent = [name for name in ("radosgw", "ceph-mon", "ceph-osd", "openssl") if shutil.which(name) is None]
    return f"needs Ceph: apt-get install --no-install-recommends {' '.join(absent)}" if absent else None


def without_azurite() -> str | None:
    """Why no emulator can be started here, if so."""
    found = os.environ.get("KVTIER_AZURITE") or shutil.which("azurite-blob")
    return None if found else "needs Azurite: npm install --ignore-scripts azurite"

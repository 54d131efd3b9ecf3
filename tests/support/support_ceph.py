"""A real S3 service for tests: a Ceph gateway over one monitor and one store, all on this machine.

`apt-get install --no-install-recommends radosgw ceph-mon ceph-osd` brings it. The first start takes 15 s.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import obstore
from obstore.store import S3Store
from support_redis import Authority
from support_servers import frozen, server_program

from kvtier_remote import S3Backend, S3Options
from kvtier_remote.valkey.embedded import free_ports

INSTALL = "apt-get install --no-install-recommends radosgw ceph-mon ceph-osd"
START_SECONDS = 120.0
KEY_ID, SECRET = "AKIDKVTIER", "secretkvtier"
KMS_KEY_ID = "kvtier-key"
GATEWAY, STORE, MONITOR = "gateway", "osd", "mon"
"""The daemons of a cluster."""
_RULE = """<LifecycleConfiguration><Rule><ID>kvtier</ID><Filter><Prefix>{prefix}</Prefix></Filter>
<Status>Enabled</Status><Expiration><Days>{days}</Days></Expiration></Rule></LifecycleConfiguration>"""
# A gateway that is killed keeps the next one's first changes waiting for the time of a watch, 30 s if nothing is said,
# and a lock of lifecycle rules that was not given back keeps the next one's rule waiting for 90 s.
_CONFIG = """[global]
fsid = {fsid}
mon initial members = a
mon host = [v2:127.0.0.1:{mon},v1:127.0.0.1:{mon_old}]
public addr = 127.0.0.1
cluster addr = 127.0.0.1
ms bind ipv6 = false
keyring = {folder}/keyring
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 8
osd pool default pg autoscale mode = off
mon allow pool size one = true
mon data avail crit = 1
osd crush chooseleaf type = 0
osd client watch timeout = 3
rgw lc lock max time = 5
osd objectstore = {objectstore}
memstore device bytes = 4294967296
bluestore block size = 4294967296
rgw crypt s3 kms backend = testing
rgw crypt s3 kms encryption keys = {kms}
run dir = {folder}/run
admin socket = {folder}/run/$name.asok
log file = {folder}/log/$name.log
mon data = {folder}/mon
osd data = {folder}/osd
rgw data = {folder}/rgw
"""


class Ceph:
    """A cluster in a folder of its own, and its gateway, which speaks in clear and over TLS."""

    def __init__(self, folder: Path, objectstore: str) -> None:
        self.folder = folder
        self.processes: list[subprocess.Popen[bytes]] = []
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}
        mon, mon_old, port, tls_port = free_ports(4)
        self.endpoint = f"http://127.0.0.1:{port}"
        self.tls_endpoint = f"https://127.0.0.1:{tls_port}"
        for name in (MONITOR, STORE, "run", "log", "rgw"):
            (folder / name).mkdir()
        names = {"fsid": uuid.uuid4(), "mon": mon, "mon_old": mon_old, "folder": folder, "objectstore": objectstore}
        kms = f"{KMS_KEY_ID}={base64.b64encode(os.urandom(32)).decode()}"
        (folder / "ceph.conf").write_text(_CONFIG.format(kms=kms, **names))
        for name, text in (("key-id", KEY_ID), ("secret", SECRET)):
            (folder / name).write_text(text)
            (folder / name).chmod(0o600)
        self.mon_address = f"[v2:127.0.0.1:{mon},v1:127.0.0.1:{mon_old}]"
        self.fsid = str(names["fsid"])
        self.authority = Authority(folder / "authority")
        self.certificate = self.authority.issue("gateway")
        """The gateway's certificate and its key, from its next start on."""

    def run(self, program: str, *words: str, given: str = "") -> str:
        """What a tool of Ceph prints."""
        command = [server_program(program, INSTALL), *words]
        done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=START_SECONDS, check=False)
        assert done.returncode == 0, (command, done.stderr)
        return done.stdout

    def spawn(self, daemon: str, program: str, *words: str) -> None:
        """A daemon in the foreground, which ends with this process however that ends."""
        bound = ["setpriv", "--pdeathsig", "KILL", server_program(program, INSTALL)]
        command = [*bound, "-c", str(self.folder / "ceph.conf"), *words, "-f"]
        with (self.folder / "log" / f"{program}.out").open("ab") as log:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self.processes.append(process)
        self.daemons[daemon] = process

    def boot(self) -> None:
        """The monitor, the store, the gateway and a user."""
        folder, config = str(self.folder), ("-c", str(self.folder / "ceph.conf"))
        keyring = f"{folder}/keyring"
        everything = ("--cap", "mon", "allow *", "--cap", "osd", "allow *", "--cap", "mgr", "allow *")
        make_key = ("ceph-authtool", keyring, "--gen-key")
        self.run(*make_key, "--create-keyring", "-n", "mon.", "--cap", "mon", "allow *")
        self.run(*make_key, "-n", "client.admin", *everything)
        monmap = ("--create", "--clobber", "--fsid", self.fsid, "--addv", "a", self.mon_address, f"{folder}/monmap")
        self.run("monmaptool", *monmap)
        self.run("ceph-mon", *config, "--mkfs", "-i", "a", "--monmap", f"{folder}/monmap", "--keyring", keyring)
        self.start(MONITOR)
        key, osd = self.run("ceph-authtool", "--gen-print-key").strip(), str(uuid.uuid4())
        self.run("ceph", *config, "osd", "new", osd, "-i", "-", given=json.dumps({"cephx_secret": key}))
        (self.folder / STORE / "keyring").write_text(f"[osd.0]\nkey = {key}\n")
        self.run("ceph-osd", *config, *self._of_store, "--mkfs", "--osd-uuid", osd)
        self.start(STORE)
        self.start()
        user = ("--uid=kv", "--display-name=kv", f"--access-key={KEY_ID}", f"--secret={SECRET}", "--max-buckets=10000")
        self.admin("user", "create", *user)

    @property
    def _of_store(self) -> tuple[str, ...]:
        return ("-i", "0", "--keyring", f"{self.folder}/{STORE}/keyring")

    def start(self, daemon: str = GATEWAY) -> None:
        """Start a daemon; the gateway answers then."""
        if daemon == MONITOR:
            self.spawn(daemon, "ceph-mon", "-i", "a")
        elif daemon == STORE:
            self.spawn(daemon, "ceph-osd", *self._of_store)
        else:
            clear, tls = (endpoint.rpartition("/")[2] for endpoint in (self.endpoint, self.tls_endpoint))
            certificate = "ssl_certificate={} ssl_private_key={}".format(*self.certificate)
            frontend = f"--rgw_frontends=beast endpoint={clear} ssl_endpoint={tls} {certificate}"
            self.spawn(daemon, "radosgw", "-n", "client.admin", "--keyring", f"{self.folder}/keyring", frontend)
            self.wait()

    def wait(self) -> None:
        """Until the gateway answers."""
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                urllib.request.urlopen(self.endpoint, timeout=5).close()
                return
            except OSError:
                assert self.daemons[GATEWAY].poll() is None, "the gateway has ended"
                assert time.monotonic() < deadline, "the gateway does not answer"
                time.sleep(0.05)

    def kill(self, daemon: str = GATEWAY) -> None:
        """A daemon ends at once."""
        self.daemons[daemon].kill()
        self.daemons[daemon].wait()

    def frozen(self, daemon: str = GATEWAY) -> AbstractContextManager[None]:
        """A daemon does not run for a while; its connections stay."""
        return frozen(self.daemons[daemon].pid, self.wait)

    def admin(self, *words: str) -> str:
        """What `radosgw-admin` prints."""
        return self.run("radosgw-admin", "-c", str(self.folder / "ceph.conf"), *words)

    @property
    def over_tls(self) -> dict[str, Any]:
        """Options of tiers that speak TLS with the gateway and trust it."""
        return {"endpoint": self.tls_endpoint, "ca_file": self.authority.file, "allow_http": False}

    def at_rest(self, name: str) -> bytes:
        """What the store below the gateway holds of an object, as it is there."""
        tool = ("rados", "-c", str(self.folder / "ceph.conf"), "-p", "default.rgw.buckets.data")
        (stored,) = (one for one in self.run(*tool, "ls").splitlines() if one.endswith(f"_{name}"))
        file = self.folder / "at-rest"
        self.run(*tool, "get", stored, str(file))
        return file.read_bytes()

    def stop(self) -> None:
        """End every daemon."""
        for process in reversed(self.processes):
            process.kill()
            process.wait()


class Bucket:
    """A new bucket of a gateway, with a lifecycle rule for `rule`, and tiers in it."""

    def __init__(self, ceph: Ceph, rule: str = "kvtier/b/", days: int = 3) -> None:
        self.ceph = ceph
        self.name = f"kv-{uuid.uuid4().hex[:12]}"
        self.ask("PUT", "create")
        if rule:
            self.ask("PUT", "lifecycle", _RULE.format(prefix=rule, days=days).encode())

    @property
    def store(self) -> S3Store:
        """The bucket from outside, without a tier, over connections of its own."""
        return self._store()

    def _store(self, **more: Any) -> S3Store:
        where: dict[str, Any] = {"endpoint": self.ceph.endpoint, "region": "us-east-1"}
        keys: dict[str, Any] = {"access_key_id": KEY_ID, "secret_access_key": SECRET}
        client: dict[str, Any] = {"allow_http": True, "timeout": "60s"}
        return S3Store(self.name, **(where | keys | more), client_options=client)

    def ask(self, method: str, what: str, data: bytes | None = None) -> bytes:
        """A request about the bucket itself, such as its `lifecycle`, by an address that the library has signed."""
        store = self._store(endpoint=f"{self.ceph.endpoint}/{self.name}?{what}=&x=", virtual_hosted_style_request=True)
        address = obstore.sign(store, method, "", timedelta(seconds=60))  # type: ignore[call-overload]
        request = urllib.request.Request(address, data, method=method)
        if data is not None:
            request.add_header("Content-MD5", base64.b64encode(hashlib.md5(data).digest()).decode())
        with urllib.request.urlopen(request, timeout=60) as answer:
            return bytes(answer.read())

    def options(self, **changes: Any) -> S3Options:
        """Options of a tier in this bucket. A slow machine gets time; what is frozen is tested with less."""
        keys = {
            "access_key_file": str(self.ceph.folder / "key-id"),
            "secret_key_file": str(self.ceph.folder / "secret"),
        }
        fixed = {"type": "s3", "bucket": self.name, "endpoint": self.ceph.endpoint, "allow_http": True}
        bound: dict[str, Any] = {"write_bytes_per_day": "64PiB", "expire_days": 3}  # a microsecond brings enough
        bound["allow_unbounded"] = True  # whatever the bucket's rule
        times = {"request_timeout_seconds": 20.0, "job_timeout_seconds": 40.0, "credentials": keys}
        return S3Options.model_validate(fixed | bound | times | changes)

    def tier(self, **changes: Any) -> S3Backend:
        """A new tier in this bucket, not open."""
        return S3Backend(self.options(**changes))


@contextmanager
def ceph_cluster(objectstore: str = "memstore") -> Iterator[Ceph]:
    """A cluster that ends with the block. Names of its sockets must be short, so it lies in the system's own folder.

    With `bluestore` its store survives being killed.
    """
    server_program("radosgw", INSTALL)
    folder = Path(tempfile.mkdtemp(prefix="kvc"))
    try:
        ceph = Ceph(folder, objectstore)
    except BaseException:
        shutil.rmtree(folder)
        raise
    try:
        ceph.boot()
        obstore.put(Bucket(ceph).store, "first", b"")  # the gateway makes its pools, which takes seconds
        yield ceph
    finally:
        ceph.stop()
        shutil.rmtree(folder)

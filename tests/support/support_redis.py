"""A real Redis server that speaks TLS, from the system's package, and certificates made with openssl."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support_servers import server_program
from support_valkey import Server

from kvtier.cli.temporary_folders import temporary_folder
from kvtier_remote import ValkeyOptions
from kvtier_remote.valkey.embedded import EmbeddedServer, embedded_server, free_ports

HERE = "DNS:localhost,IP:127.0.0.1"
ELSEWHERE = "DNS:elsewhere.example,IP:192.0.2.1"
_CA = """[ca]
default_ca = own
[own]
database = {folder}/index.txt
new_certs_dir = {folder}
rand_serial = yes
default_md = sha256
policy = any
copy_extensions = copy
[any]
commonName = supplied
"""


class Authority:
    """An authority of this test's own. Files: `ca.crt`, and for each certificate `NAME.crt` and `NAME.key`."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        self._openssl = server_program("openssl", "apt-get install openssl")
        self._make("ca", "-x509", "-days", "2", "-subj", "/CN=kvtier tests", "-addext", "keyUsage=keyCertSign,cRLSign")

    @property
    def file(self) -> str:
        """Its own certificate, as `tls.ca_file` names it."""
        return str(self.folder / "ca.crt")

    def issue(self, name: str, names: str = HERE) -> tuple[str, str]:
        """A certificate for these names, and its key."""
        signed_by = ("-CA", self.file, "-CAkey", str(self.folder / "ca.key"))
        purpose = ("-addext", f"subjectAltName={names}", "-addext", "basicConstraints=critical,CA:FALSE")
        return self._make(name, "-x509", "-days", "2", "-subj", f"/CN={name}", *purpose, *signed_by)

    def issue_expired(self, name: str) -> tuple[str, str]:
        """A certificate for this host that was valid until a year ago, and its key."""
        asked, key = self._make(f"{name}-request", "-subj", f"/CN={name}", "-addext", f"subjectAltName={HERE}")
        certificate, config = str(self.folder / f"{name}.crt"), self.folder / "ca.conf"
        config.write_text(_CA.format(folder=self.folder))
        (self.folder / "index.txt").touch()
        signed_by = ("-cert", self.file, "-keyfile", str(self.folder / "ca.key"), "-config", str(config))
        year = time.gmtime().tm_year
        valid = ("-startdate", f"{year - 2}0101000000Z", "-enddate", f"{year - 1}0101000000Z")
        self._run("ca", "-batch", *signed_by, *valid, "-in", asked, "-out", certificate)
        return certificate, key

    def _make(self, name: str, *more: str) -> tuple[str, str]:
        files = str(self.folder / f"{name}.crt"), str(self.folder / f"{name}.key")
        kind = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-noenc")
        self._run("req", *kind, "-out", files[0], "-keyout", files[1], *more)
        return files

    def _run(self, *words: str) -> None:
        subprocess.run([self._openssl, *words], check=True, capture_output=True, timeout=60)


class RedisServer(Server):
    """Tiers speak TLS with it; the client that looks at it from outside speaks in clear, on a port of its own."""

    def __init__(self, server: EmbeddedServer, tls_port: int, authority: Authority) -> None:
        super().__init__(server)
        self.address = f"127.0.0.1:{tls_port}"
        self.authority = authority

    def options(self, **changes: Any) -> ValkeyOptions:
        """Options of a tier that trusts this server."""
        return super().options(**({"tls": {"ca_file": self.authority.file}} | changes))


@contextmanager
def redis_server(authority: Authority, names: str = HERE, **config: Any) -> Iterator[RedisServer]:
    """A server with a certificate for `names`; keys of `config` are those of redis.conf with underscores."""
    program = Path(server_program("redis-server", "apt-get install redis-server"))
    certificate, key = authority.issue("server", names)
    (tls_port,) = free_ports(1)
    tls = {"tls_port": str(tls_port), "tls_cert_file": certificate, "tls_key_file": key}
    trust = {"tls_ca_cert_file": authority.file, "tls_auth_clients": "no"}
    given = {"maxmemory": "256mb", "maxmemory_policy": "allkeys-lru"} | tls | trust | config
    settings = {name.replace("_", "-"): value for name, value in given.items()}
    with temporary_folder("kvtier-redis-") as folder, embedded_server(Path(folder), settings, program) as process:
        server = RedisServer(process, tls_port, authority)
        try:
            yield server
        finally:
            server.client.close()

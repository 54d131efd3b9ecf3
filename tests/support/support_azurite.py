"""A blob service for tests: Azurite, Microsoft's emulator of Azure. `npm install --ignore-scripts azurite` brings it.

It is found by PATH, or by `KVTIER_AZURITE`, the path of `azurite-blob`.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import subprocess
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from email.utils import formatdate
from http import HTTPStatus
from pathlib import Path
from typing import Any

from obstore.store import AzureStore
from support_servers import frozen, server_program

from kvtier.cli.temporary_folders import temporary_folder
from kvtier_remote import AzureBackend, AzureOptions
from kvtier_remote.valkey.embedded import free_ports

INSTALL = "npm install --ignore-scripts azurite"
START_SECONDS = 60.0
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""The emulator's well-known key."""
_VERSION = "2021-12-02"


class Azurite:
    """A running emulator, which keeps its blobs in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (port,) = free_ports(1)
        self.address = f"http://127.0.0.1:{port}"
        self.endpoint = f"{self.address}/{ACCOUNT}"
        (folder / "key").write_text(KEY)
        (folder / "key").chmod(0o600)
        words = ("--blobHost", "127.0.0.1", "--blobPort", str(port), "--location", str(folder / "blobs"))
        quiet = ("--silent", "--skipApiVersionCheck", "--disableTelemetry")
        program = os.environ.get("KVTIER_AZURITE") or server_program("azurite-blob", INSTALL)
        self._command = [program, *words, *quiet]
        self.start()

    def start(self) -> None:
        """Start it, with the blobs it had."""
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(self._command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        self.wait()

    def frozen(self) -> AbstractContextManager[None]:
        """It does not run for a while; its connections stay."""
        return frozen(self.process.pid, self.wait)

    def wait(self) -> None:
        """Until it answers."""
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                urllib.request.urlopen(self.address, timeout=5).close()
                return
            except urllib.error.HTTPError:
                return
            except OSError:
                assert self.process.poll() is None, (self.folder / "log").read_text()
                assert time.monotonic() < deadline, "Azurite does not answer"
                time.sleep(0.05)

    def stop(self) -> None:
        """End it."""
        self.process.kill()
        self.process.wait()


class Container:
    """A new container, and tiers in it."""

    def __init__(self, azurite: Azurite) -> None:
        self.azurite = azurite
        self.name = f"kv-{uuid.uuid4().hex[:12]}"
        self.create()

    def create(self) -> None:
        """Unless it is there. By a request of our own: the library makes no containers."""
        date = formatdate(usegmt=True)
        headers = f"x-ms-date:{date}\nx-ms-version:{_VERSION}"
        place = f"/{ACCOUNT}/{ACCOUNT}/{self.name}\nrestype:container"
        text = "\n".join(("PUT", *[""] * 11, headers, place))
        digest = hmac.new(base64.b64decode(KEY), text.encode(), hashlib.sha256).digest()
        request = urllib.request.Request(f"{self.azurite.endpoint}/{self.name}?restype=container", method="PUT")
        request.add_header("x-ms-date", date)
        request.add_header("x-ms-version", _VERSION)
        request.add_header("Authorization", f"SharedKey {ACCOUNT}:{base64.b64encode(digest).decode()}")
        try:
            urllib.request.urlopen(request, timeout=START_SECONDS).close()
        except urllib.error.HTTPError as refused:
            if refused.code != HTTPStatus.CONFLICT:
                raise

    @property
    def store(self) -> AzureStore:
        """The container from outside, without a tier, over connections of its own."""
        account: dict[str, Any] = {"account_name": ACCOUNT, "account_key": KEY, "endpoint": self.azurite.endpoint}
        return AzureStore(container_name=self.name, **account, client_options={"allow_http": True})

    def options(self, **changes: Any) -> AzureOptions:
        """Options of a tier in this container. A slow machine gets time."""
        keys = {"account_key_file": str(self.azurite.folder / "key")}
        fixed = {"type": "azure", "account": ACCOUNT, "container": self.name, "endpoint": self.azurite.endpoint}
        times = {"request_timeout_seconds": 20.0, "job_timeout_seconds": 40.0, "credentials": keys}
        allowed = {"allow_http": True, "allow_unbounded": True}
        return AzureOptions.model_validate(fixed | times | allowed | changes)

    def tier(self, **changes: Any) -> AzureBackend:
        """A new tier in this container, not open."""
        return AzureBackend(self.options(**changes))


@contextmanager
def azurite() -> Iterator[Azurite]:
    """An emulator that ends with the block."""
    with temporary_folder("kvtier-azure-") as folder:
        one = Azurite(Path(folder))
        try:
            yield one
        finally:
            one.stop()

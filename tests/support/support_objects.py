"""Object stores for tests: local folders through the client library, and real servers where they are installed."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any, Literal

import obstore
from obstore.store import LocalStore
from support_remote_blocks import TWO_SIZES

from kvtier.testing.conformance.base import ConformanceBase
from kvtier_remote.objects.options import ObjectOptions
from kvtier_remote.objects.tier import ObjectBackend
from kvtier_remote.objects.transport import ObjectTransport
from kvtier_remote.transport import Transport


class LocalOptions(ObjectOptions):
    """A folder in place of a bucket. A slow machine gets time."""

    type: Literal["local"] = "local"
    bucket: str
    allow_unbounded: bool = True
    request_timeout_seconds: float = 20.0
    job_timeout_seconds: float = 40.0


class LocalTransport(ObjectTransport):
    """Folders of one process: nothing takes long."""

    race_seconds = 0.01


class LocalBackend(ObjectBackend):
    """The tier over the library's store of local files."""

    Options = LocalOptions
    options: LocalOptions

    def _make_transport(self) -> Transport:
        return LocalTransport(self.options, self._connect, self._renewing())

    def _connect(self) -> LocalStore:
        return LocalStore(self.options.bucket, mkdir=True)


class Folder:
    """A bucket that is a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def store(self) -> LocalStore:
        """The bucket from outside, without the tier."""
        return LocalStore(str(self.path), mkdir=True)

    def tier(self, **changes: Any) -> LocalBackend:
        """A new tier, not open."""
        return LocalBackend(LocalOptions.model_validate({"bucket": str(self.path)} | changes))


def names(store: Any, prefix: str | None = None) -> list[str]:
    """All names in a bucket, sorted."""
    return sorted(one["path"] for some in obstore.list(store, prefix) for one in some)


def read(store: Any, name: str) -> bytes:
    """The bytes of an object."""
    return bytes(obstore.get(store, name).bytes())


def write(store: Any, name: str, data: bytes) -> None:
    """Put an object in place of the one there."""
    obstore.put(store, name, data, use_multipart=False)


def damage(store: Any, prefix: str) -> bool:
    """Change one bit in the last byte of every block under a prefix."""
    found = names(store, f"{prefix}/b/")
    for name in found:
        value = bytearray(read(store, name))
        value[-1] ^= 0x10
        write(store, name, bytes(value))
    return bool(found)


def warm_up(store: Any) -> None:
    """Start the library's native runtime, which keeps a few descriptors as long as the process lives."""

    async def look() -> None:
        await obstore.list_with_delimiter_async(store, "nothing")

    asyncio.run(look())


class Blocks(ConformanceBase):
    """Opens tiers on a bucket with the stand-in for the control plane above them; groups of two sizes."""

    layout = TWO_SIZES

    def __init__(self, bucket: Any, /, **changes: Any) -> None:
        self.bucket = bucket
        self.wall_ns = time.time_ns
        self.changes = changes

    def make(self, place: Path) -> ObjectBackend:
        tier: ObjectBackend = self.bucket.tier(**self.changes)
        tier._wall_ns = self.wall_ns
        return tier

"""The conformance suite of transports over ObjectTransport: a local folder, a Ceph gateway, Azure's emulator."""

from __future__ import annotations

import errno
import uuid
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import obstore
import pytest
from obstore.store import S3Store
from support_azurite import Azurite, Container
from support_ceph import Bucket, Ceph
from support_objects import Folder, LocalTransport, names

from kvtier.errors import ConfigError
from kvtier.types.jobs import LOADED, failed
from kvtier_remote.conformance import TransportTests
from kvtier_remote.objects.library import store_of
from kvtier_remote.objects.options import S3Options
from kvtier_remote.objects.transport import ObjectTransport
from kvtier_remote.transport import Marker, Value, ValueRef


class RacingTransport(LocalTransport):
    """As much time as eight clients of one loop need to see each other's markers."""

    race_seconds = 0.3


class ObjectTransportTests(TransportTests):
    """What a folder and a service have in common."""

    races_end_at_once = False

    def store(self, place: Path) -> Any:
        """The bucket from outside."""
        raise NotImplementedError

    def lose_markers(self, place: Path) -> bool:
        store = self.store(place)
        found = [name for name in names(store) if "/m/" in name]
        obstore.delete(store, found)
        return bool(found)


class TestLocalFolder(ObjectTransportTests):
    """The library's store of local files."""

    @pytest.fixture(autouse=True)
    def _in(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        self.folder = Folder(tmp_path_factory.mktemp("bucket") / uuid.uuid4().hex)

    def make(self, place: Path) -> ObjectTransport:
        tier = self.folder.tier()
        return RacingTransport(tier.options, tier._connect)

    def store(self, place: Path) -> Any:
        return self.folder.store


async def test_a_panic_of_the_library_is_a_request_that_failed():
    """Such as over an access key of two lines. Its class is no error of the library, and none of the system."""
    given = {"bucket": "kv-cache", "endpoint": "http://127.0.0.1:1", "allow_http": True, "allow_unbounded": True}
    client = {"client_options": {"allow_http": True}, "retry_config": {"max_retries": 0}}
    store = S3Store(
        "kv-cache", region="x", endpoint=given["endpoint"], access_key_id="a\nb", secret_access_key="c", **client
    )
    transport = ObjectTransport(S3Options.model_validate(given), lambda: store)
    with pytest.raises(ConfigError):
        await transport.open()
    places = [ValueRef(f"kvtier/b/{number}", 4096, 4096) for number in range(2)]
    values = [Value(place, memoryview(bytearray(4096)), bytes(4096)) for place in places]
    assert await transport.put(values) == [failed(errno.EBADMSG)] * 2
    assert await transport.get(values, lambda position, header: LOADED) == [failed(errno.EBADMSG)] * 2
    marker = Marker(bytes(8), 1)
    for call in (
        transport.present(places),
        transport.remove(places),
        transport.describe("kvtier/n/1", "text"),
        transport.read_marker("kvtier/m/1"),
        transport.swap_marker("kvtier/m/1", None, marker),
        transport.keep_lease("kvtier/m/1", "kvtier/l/1"),
    ):
        with pytest.raises(OSError):
            await call
    assert await transport.close(10.0) == 0


class ServiceTransportTests(ObjectTransportTests):
    """A bucket of a service of its own, which may be frozen."""

    bucket: Any

    def _transport(self, **changes: object) -> ObjectTransport:
        options = self.bucket.options(**changes)
        return ObjectTransport(options, lambda: store_of(options))

    def make(self, place: Path) -> ObjectTransport:
        return self._transport()

    def make_unreachable(self, place: Path) -> ObjectTransport:
        return self._transport(endpoint="http://127.0.0.1:1")

    def make_hurried(self, place: Path) -> ObjectTransport:
        return self._transport(request_timeout_seconds=2.0)

    def store(self, place: Path) -> Any:
        return self.bucket.store


@pytest.mark.remote
class TestCephGateway(ServiceTransportTests):
    """S3."""

    @pytest.fixture(autouse=True)
    def _in(self, ceph: Ceph) -> None:
        self.bucket = Bucket(ceph)

    def frozen(self) -> AbstractContextManager[None]:
        return self.bucket.ceph.frozen()


@pytest.mark.remote
@pytest.mark.azure
class TestAzurite(ServiceTransportTests):
    """Azure."""

    @pytest.fixture(autouse=True)
    def _in(self, azurite: Azurite) -> None:
        self.bucket = Container(azurite)

    def frozen(self) -> AbstractContextManager[None]:
        return self.bucket.azurite.frozen()

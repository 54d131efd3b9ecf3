"""The conformance suite of transports over ObjectTransport: a local folder, a Ceph gateway, Azure's emulator."""

from __future__ import annotations

import uuid
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import obstore
import pytest
from support_azurite import Azurite, Container
from support_ceph import Bucket, Ceph
from support_objects import Folder, LocalTransport, names

from kvtier_remote.conformance import TransportTests
from kvtier_remote.objects.library import store_of
from kvtier_remote.objects.transport import ObjectTransport


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

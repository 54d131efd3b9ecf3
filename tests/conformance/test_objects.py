"""The conformance suite over object stores: a local folder here, real servers where they are installed."""

from __future__ import annotations

from pathlib import Path

import pytest
from support_azurite import Azurite, Container
from support_ceph import Bucket, Ceph
from support_objects import Folder, damage, warm_up

from kvtier.testing.conformance import LoadStoreTests
from kvtier_remote.objects.tier import ObjectBackend


@pytest.fixture(scope="module", autouse=True)
def _warm(tmp_path_factory: pytest.TempPathFactory) -> None:
    warm_up(Folder(tmp_path_factory.mktemp("warm")).store)


class TestLocalFolder(LoadStoreTests):
    """Each place is a bucket of its own."""

    survives_reopen = True

    def make(self, place: Path) -> ObjectBackend:
        return Folder(place).tier()

    def damage(self, place: Path) -> bool:
        return damage(Folder(place).store, "kvtier")


class ServiceTests(LoadStoreTests):
    """Each place is a prefix of its own in one bucket."""

    survives_reopen = True
    machine_examples = 5

    def start(self, bucket: Bucket | Container) -> None:
        self.bucket = bucket
        warm_up(bucket.store)
        self.prefixes: dict[Path, str] = {}

    def prefix(self, place: Path) -> str:
        return self.prefixes.setdefault(place, f"test-{len(self.prefixes)}")

    def make(self, place: Path) -> ObjectBackend:
        return self.bucket.tier(prefix=self.prefix(place))

    def damage(self, place: Path) -> bool:
        return damage(self.bucket.store, self.prefix(place))


@pytest.mark.remote
class TestCephGateway(ServiceTests):
    """S3."""

    @pytest.fixture(autouse=True)
    def _on(self, ceph: Ceph) -> None:
        self.start(Bucket(ceph, rule=""))


@pytest.mark.remote
@pytest.mark.azure
class TestAzurite(ServiceTests):
    """Azure's emulator."""

    @pytest.fixture(autouse=True)
    def _on(self, azurite: Azurite) -> None:
        self.start(Container(azurite))

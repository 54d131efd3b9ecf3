"""The conformance suite over buckets of real clouds, which the environment names: `python -m pytest -m cloud`.

`KVTIER_CLOUD_S3`, `KVTIER_CLOUD_GCS` and `KVTIER_CLOUD_AZURE` hold a tier's entry as in a stack file, such as
`{bucket: my-tests, region: eu-central-1}`; the credentials come from where the client library looks for them. All is
written under prefixes of this run alone, and removed at its end.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import obstore
import pytest
import yaml
from support_objects import damage, names, warm_up

from kvtier.testing.conformance import LoadStoreTests
from kvtier_remote import AzureBackend, GCSBackend, S3Backend
from kvtier_remote.objects.tier import ObjectBackend

TIMES = {"request_timeout_seconds": 20.0, "job_timeout_seconds": 40.0}


class CloudTests(LoadStoreTests):
    """Each place is a prefix of its own."""

    survives_reopen = True
    machine_examples = 2
    backend: ClassVar[type[ObjectBackend]]
    variable: ClassVar[str]

    @pytest.fixture(autouse=True)
    def _in_the_cloud(self) -> Iterator[None]:
        text = os.environ.get(self.variable)
        if not text:
            pytest.skip(f"needs {self.variable}: a tier's entry as in a stack file, without type and prefix")
        self.given: dict[str, Any] = yaml.safe_load(text)
        self.run = f"kvtier-test-{secrets.token_hex(4)}"
        self.prefixes: dict[Path, str] = {}
        store = self.tier("none")._connect()
        warm_up(store)
        yield
        for prefix in self.prefixes.values():
            obstore.delete(store, names(store, f"{prefix}/"))

    def tier(self, prefix: str) -> ObjectBackend:
        fixed = {"prefix": prefix, "allow_unbounded": True} | TIMES
        return self.backend(self.backend.Options.model_validate(self.given | fixed))

    def prefix(self, place: Path) -> str:
        return self.prefixes.setdefault(place, f"{self.run}-{len(self.prefixes)}")

    def make(self, place: Path) -> ObjectBackend:
        return self.tier(self.prefix(place))

    def damage(self, place: Path) -> bool:
        prefix = self.prefix(place)
        return damage(self.tier(prefix)._connect(), prefix)


@pytest.mark.cloud
class TestS3(CloudTests):
    backend = S3Backend
    variable = "KVTIER_CLOUD_S3"


@pytest.mark.cloud
class TestGCS(CloudTests):
    backend = GCSBackend
    variable = "KVTIER_CLOUD_GCS"


@pytest.mark.cloud
class TestAzure(CloudTests):
    backend = AzureBackend
    variable = "KVTIER_CLOUD_AZURE"

"""Types `s3`, `gcs` and `azure`: blocks as objects of a bucket that many processes and hosts share."""

from typing import ClassVar

from kvtier.errors import ConfigError
from kvtier.tier.registry import DryRun
from kvtier.types.geometry import Geometry
from kvtier_remote.backend import RemoteBackend
from kvtier_remote.objects.bound import cost_notes, facts_of, look_into
from kvtier_remote.objects.library import INSTALL, Store, installed, store_of
from kvtier_remote.objects.options import AzureOptions, GCSOptions, ObjectOptions, S3Options
from kvtier_remote.objects.renewal import RenewalHooks
from kvtier_remote.objects.transport import ObjectTransport
from kvtier_remote.transport import Transport


class ObjectBackend(RemoteBackend):
    """The tier over `obstore`. What is written in a day, times the days it is kept, bounds what is stored."""

    Options: ClassVar[type[ObjectOptions]]
    options: ObjectOptions

    def _make_transport(self) -> Transport:
        return ObjectTransport(self.options, self._connect, self._renewing())

    def _renewing(self) -> RenewalHooks | None:
        """The hooks of renewals, if there are to be any."""
        return RenewalHooks(self._wall_ns, self._may_write, self.counters) if self.options.renew else None

    async def _may_write(self, size: int) -> bool:
        """True if the write budget, where there is one, has room for these bytes."""
        return self._budget is None or await self._budget.take([size]) == 1

    def _connect(self) -> Store:
        return store_of(self.options)

    def dry_run(self, geometry: Geometry, probe: bool) -> DryRun:
        """The facts of the tier if it were opened now. Connects only to probe, and leaves nothing behind."""
        try:
            facts = look_into(self._connect(), self.options) if probe else facts_of(self.options)
        except ConfigError as error:
            return DryRun(problems=(error,))
        missing = () if installed() else (f"this tier {INSTALL}",)
        notes = (*facts.notes, *cost_notes(self.options, geometry), *missing)
        return DryRun(facts.capacity_bytes, mode="remote", notes=notes, probe_prefix=True)


class S3Backend(ObjectBackend):
    """Amazon S3, or a service that speaks its language."""

    Options: ClassVar[type[ObjectOptions]] = S3Options


class GCSBackend(ObjectBackend):
    """Google Cloud Storage."""

    Options: ClassVar[type[ObjectOptions]] = GCSOptions


class AzureBackend(ObjectBackend):
    """Azure Blob Storage."""

    Options: ClassVar[type[ObjectOptions]] = AzureOptions

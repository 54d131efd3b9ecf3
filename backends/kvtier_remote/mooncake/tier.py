"""Type `mooncake`: blocks in a pool of memory that many hosts lend to each other."""

from typing import ClassVar

from kvtier.errors import ConfigError
from kvtier.options import TierOptions
from kvtier.tier.contract import Opened, TierContext
from kvtier.tier.registry import DryRun
from kvtier.types.geometry import Geometry
from kvtier_remote.backend import RemoteBackend
from kvtier_remote.mooncake.client_process import INSTALL, ClientProcess, installed
from kvtier_remote.mooncake.marker_object import MEMORY_BYTES
from kvtier_remote.mooncake.options import MooncakeOptions
from kvtier_remote.mooncake.pool_trial import try_pool
from kvtier_remote.mooncake.transport import SIZE_NOTE, UNKNOWN_BYTES, MooncakeTransport, pool_facts
from kvtier_remote.transport import Facts, Transport


class MooncakeBackend(RemoteBackend):
    """The tier over Mooncake's own client. The store's watermark bounds what is stored."""

    LOOK_UP_BEFORE_STORE: ClassVar[bool] = True
    Options: ClassVar[type[TierOptions]] = MooncakeOptions
    options: MooncakeOptions

    def _make_transport(self) -> Transport:
        return MooncakeTransport(self.options)

    async def open(self, context: TierContext) -> Opened:
        """Opens the tier. Raises ConfigError too if no block fits into the memory that blocks pass through."""
        self._check_staging(context.geometry)
        return await super().open(context)

    def _check_staging(self, geometry: Geometry) -> None:
        if geometry.row_bytes > self.options.batch_bytes:
            needed = 2 * geometry.row_bytes + self.options.staging - 2 * self.options.batch_bytes
            raise ConfigError(f"a block has {geometry.row_bytes} bytes; staging must be at least {needed}", "staging")

    def dry_run(self, geometry: Geometry, probe: bool) -> DryRun:
        """The facts of the tier if it were opened now. Connects only to probe, and leaves nothing behind."""
        facts = Facts(UNKNOWN_BYTES, (SIZE_NOTE,))
        try:
            self._check_staging(geometry)
            if probe:
                facts = pool_facts(self.options)
                connection = ClientProcess(self.options, MEMORY_BYTES)
                try:
                    connection.open()
                    try_pool(connection, self.options)
                finally:
                    connection.close()
        except ConfigError as error:
            return DryRun(problems=(error,))
        missing = () if installed() else (f"this tier {INSTALL}",)
        capacity = None if facts.capacity_bytes == UNKNOWN_BYTES else facts.capacity_bytes
        return DryRun(capacity, mode="remote", notes=(*facts.notes, *missing))

"""Type `mooncake`: blocks in a pool of memory that many hosts lend to each other."""

from typing import Any, ClassVar

from kvtier.errors import ConfigError
from kvtier.options import TierOptions
from kvtier.tier.contract import Opened, TierContext
from kvtier.tier.inspection import Access, Inspection
from kvtier.tier.registry import DryRun
from kvtier.types.geometry import Geometry
from kvtier_remote.backend import RemoteBackend
from kvtier_remote.inspect.store import RemoteInspection
from kvtier_remote.mooncake.client_process import INSTALL, ClientProcess, installed
from kvtier_remote.mooncake.listing import MooncakeListing
from kvtier_remote.mooncake.marker_object import MEMORY_BYTES
from kvtier_remote.mooncake.options import MooncakeOptions
from kvtier_remote.mooncake.pool_trial import try_pool
from kvtier_remote.mooncake.transport import SIZE_NOTE, UNKNOWN_BYTES, MooncakeTransport, pool_facts
from kvtier_remote.options import address_options
from kvtier_remote.transport import Facts, Transport


class MooncakeBackend(RemoteBackend):
    """The tier over Mooncake's own client. The store's watermark bounds what is stored."""

    LOOK_UP_BEFORE_STORE: ClassVar[bool] = True
    Options: ClassVar[type[TierOptions]] = MooncakeOptions
    options: MooncakeOptions

    def _make_transport(self) -> Transport:
        return MooncakeTransport(self.options)

    @classmethod
    def address_options(cls, address: str) -> dict[str, Any] | None:
        """The options of the tier at `mooncake://MASTER:PORT[/PREFIX]`, for the tools; else None."""
        found = address_options(address, ("mooncake",))
        return None if found is None else {"type": "mooncake", "master": found[0]} | found[1]

    @classmethod
    def inspect_server(cls, options: TierOptions, access: Access) -> Inspection:
        """The store of a tier of these options, for the tools. Raises ConfigError and RootError."""
        assert isinstance(options, MooncakeOptions)
        return RemoteInspection(MooncakeListing(options))

    async def open(self, context: TierContext) -> Opened:
        """As every remote tier. Raises ConfigError too if no block fits into the memory that blocks pass through."""
        self._check_staging(context.geometry)
        return await super().open(context)

    def _check_staging(self, geometry: Geometry) -> None:
        if geometry.row_bytes > self.options.batch_bytes:
            needed = 2 * geometry.row_bytes + self.options.staging - 2 * self.options.batch_bytes
            raise ConfigError(f"a block has {geometry.row_bytes} bytes; staging must be at least {needed}", "staging")

    def dry_run(self, geometry: Geometry, probe: bool) -> DryRun:
        """What the tier would be if it were opened now. Connects only to probe, and leaves nothing behind."""
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

"""Type `mooncake`: blocks in a pool of memory that many hosts lend to each other."""

import os
import secrets
import time
from typing import ClassVar

from kvtier.errors import ConfigError
from kvtier.options import TierOptions
from kvtier.tier.contract import Opened, TierContext
from kvtier.tier.registry import DryRun
from kvtier.types.geometry import Geometry
from kvtier_remote.backend import RemoteBackend
from kvtier_remote.mooncake.client_process import INSTALL, MISSING_CODES, NO_SPACE, ClientProcess, errno_of, installed
from kvtier_remote.mooncake.marker_object import MEMORY_BYTES, SIZE
from kvtier_remote.mooncake.options import MooncakeOptions
from kvtier_remote.mooncake.transport import SIZE_NOTE, UNKNOWN_BYTES, MooncakeTransport, pool_facts
from kvtier_remote.transport import Transport, TransportInfo

_PAUSE_SECONDS = 0.05


class MooncakeBackend(RemoteBackend):
    """The tier over Mooncake's own client. The store's watermark bounds what is stored."""

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
        facts = TransportInfo(UNKNOWN_BYTES, (SIZE_NOTE,))
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


def try_pool(connection: ClientProcess, options: MooncakeOptions) -> None:
    """Write a value of a few bytes, read and remove it. Raises ConfigError with the option to look at."""
    name = f"{options.prefix}:b:probe.{secrets.token_hex(8)}"
    try:
        _judge(options, "takes no value", _write_trial(connection, name, options.request_timeout_seconds))
        (length,) = connection.ask("get", [name], [0], [SIZE])
        (removed,) = connection.ask("remove", [name])
    except OSError as error:
        raise ConfigError(f"{options.master}: {error.strerror or 'does not answer'}", options.suspect_key) from None
    _judge(options, "does not give a value back", length)
    _judge(options, "removes no value", removed)


def _write_trial(connection: ClientProcess, name: str, seconds: float) -> int:
    """The library's code; a pool that is full makes room in a moment."""
    deadline = time.monotonic() + seconds
    while True:
        (code,) = connection.ask("put", [name], [0], [SIZE])
        if code != NO_SPACE or time.monotonic() > deadline:
            return code
        time.sleep(_PAUSE_SECONDS)


def _judge(options: MooncakeOptions, what: str, code: int) -> None:
    """Raises ConfigError for a code that is an error, unless another process that checks has removed the value."""
    if code >= 0 or code in MISSING_CODES:
        return
    if code == NO_SPACE:
        raise ConfigError(f"{options.master}: the pool has no memory; has a store's process joined it?", "master")
    reason = f"the pool {what} ({os.strerror(errno_of(code))}, code {code} of the library)"
    raise ConfigError(f"{options.master}: {reason}", options.suspect_key)

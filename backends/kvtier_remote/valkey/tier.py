"""Type `valkey`: blocks on a Valkey or Redis server that many processes and hosts share."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

from kvtier.errors import ConfigError
from kvtier.options import TierOptions
from kvtier.tier.registry import DryRun
from kvtier.types.geometry import Geometry
from kvtier_remote.backend import RemoteBackend
from kvtier_remote.transport import Transport
from kvtier_remote.valkey.cluster_nodes import ClusterNodes
from kvtier_remote.valkey.embedded import embedded_server, settings_for
from kvtier_remote.valkey.glide import INSTALL, installed
from kvtier_remote.valkey.options import ValkeyOptions
from kvtier_remote.valkey.server_facts import look_at
from kvtier_remote.valkey.transport import ValkeyTransport


class ValkeyBackend(RemoteBackend):
    """The tier over `valkey-glide-sync`. The server's `maxmemory` and its policy bound what is stored."""

    Options: ClassVar[type[TierOptions]] = ValkeyOptions
    options: ValkeyOptions

    def _make_transport(self) -> Transport:
        return ValkeyTransport(self.options)

    @contextmanager
    def embedded(self, folder: Path, blocks: int, row_bytes: int) -> Iterator[TierOptions]:
        """See `kvtier.tier.registry.EmbedsServer`. Left out is what the file says of its own server: how it is
        reached, and how much is written to it."""
        with embedded_server(folder, settings_for(blocks, row_bytes)) as server:
            reached = {"servers": [server.address], "mode": "standalone", "tls": False}
            login = {"username": "", "password_file": None, "password_env": None}
            budget = {"write_bytes_per_day": None, "state_folder": None}
            yield self.options.model_copy(update=reached | login | budget)

    def dry_run(self, geometry: Geometry, probe: bool) -> DryRun:
        """The facts of the tier if it were opened now. Connects only to probe, and leaves nothing behind."""
        if not probe:
            return DryRun(mode="remote", notes=() if installed() else (f"this tier {INSTALL}",))
        try:
            facts = look_at(self.options, ClusterNodes())
        except ConfigError as error:
            return DryRun(problems=(error,))
        return DryRun(facts.capacity_bytes, mode="remote", notes=facts.notes)

"""Embedded servers of a replay: real ones, on this machine, that end with it."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from kvtier.config import StackConfig, build_tiers
from kvtier.errors import ConfigError
from kvtier.tier.registry import EmbedsServer
from kvtier.tools.replay.setup import ReplayOptions
from kvtier.types.geometry import Geometry
from kvtier.types.keys import REMOTE

SERVER_BLOCKS = 16384
SERVER_BYTES_MAX = 4 << 30


@contextmanager
def with_servers(
    config: StackConfig, options: ReplayOptions, geometry: Geometry, scratch: Path
) -> Iterator[StackConfig]:
    """The stack with an embedded server below each tier on one, until the end of the block; the stack as it
    is where the options ask for none.

    Raises ConfigError for a stack without such a tier, for one whose server cannot be embedded, and where the server is
    not installed.
    """
    if options.server is None:
        if options.server_blocks is not None:
            raise ConfigError("goes with --server embedded only", "--server-blocks")
        yield config
        return
    row = geometry.row_bytes
    blocks = options.server_blocks or max(64, min(SERVER_BLOCKS, SERVER_BYTES_MAX // row))
    remote = [(i, tier) for i, tier in enumerate(build_tiers(config)) if tier.medium == REMOTE]
    if not remote:
        raise ConfigError("the stack has no tier on a server", "--server")
    tiers = list(config.tiers)
    with ExitStack() as servers:
        for i, tier in remote:
            if not isinstance(tier, EmbedsServer):
                raise ConfigError(f"a tier of type {tiers[i].type} cannot be given a server of its own", "--server")
            folder = scratch / f"server-{i}"
            folder.mkdir()
            try:
                tiers[i] = servers.enter_context(tier.embedded(folder, blocks, row))
            except ConfigError as error:
                raise error.below("--server") from None
        yield config.model_copy(update={"tiers": tuple(tiers)})

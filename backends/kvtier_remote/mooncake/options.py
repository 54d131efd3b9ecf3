"""Options of the tier `mooncake`."""

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from kvtier.options import ByteSize, Seconds
from kvtier_remote.options import RemoteOptions, Server

BATCH_BLOCKS = 32
CONNECTIONS = 2
"""Each has a process of its own, which spins while it waits."""
START_SECONDS = 30.0
"""A process that could not connect within this time ends itself."""
HEADERS_BYTES = BATCH_BLOCKS * 8192
HANDSHAKE = "P2PHANDSHAKE"
"""In place of a metadata server: the processes ask each other."""


class MooncakeOptions(RemoteOptions):
    """Type `mooncake`: the pool of memory of a Mooncake store, which has neither login nor encryption."""

    SECRETS_FROM: ClassVar[str] = "nothing: Mooncake has no login"

    type: Literal["mooncake"] = "mooncake"
    master: Server = Field(description="host:port of the master")
    admin: Server | None = Field(
        default=None, description="host:port of the master's HTTP port: the pool's size, and its names for the tools"
    )
    protocol: Literal["tcp", "rdma"] = Field(default="tcp", description="how blocks move between hosts")
    devices: str = Field(
        default="",
        max_length=1024,
        pattern=r"^[A-Za-z0-9_,.-]*$",
        description="RDMA devices, separated by commas; the library chooses when empty",
    )
    replicas: int = Field(default=1, ge=1, le=8, description="copies of a block in the pool")
    tenant: str = Field(
        default="default", pattern=r"^[A-Za-z0-9_.-]{1,64}$", description="tenant, where the master keeps them apart"
    )
    metadata_server: str = Field(
        default=HANDSHAKE,
        max_length=256,
        pattern=r"^[A-Za-z0-9_.:/,;\[\]-]+$",
        description="address of a metadata server, where the store uses one; without a password",
    )
    local_hostname: str = Field(
        default="127.0.0.1",
        pattern=r"^[A-Za-z0-9_.:-]{1,253}$",
        description="how the other hosts reach this one; its address on their network",
    )
    staging: ByteSize = Field(
        default=64 << 20, ge=4 << 20, description="memory that blocks pass through; half of it bounds one call"
    )
    request_timeout_seconds: Seconds = Field(default=2.0, le=60, description="a request that takes longer has failed")

    @property
    def open_seconds(self) -> float:
        """Two lots of processes may take their time to start."""
        return super().open_seconds + 2 * START_SECONDS

    @property
    def suspect_key(self) -> str:
        """The option to look at when the library does not connect to a pool whose master answers."""
        if self.metadata_server != HANDSHAKE:
            return "metadata_server"
        return "devices" if self.devices else "master"

    @property
    def batch_bytes(self) -> int:
        """Payload bytes of one call."""
        return self.staging // CONNECTIONS - HEADERS_BYTES

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.devices and self.protocol != "rdma":
            raise ValueError("devices are those of protocol: rdma")
        return self

"""Options of the tier `valkey`."""

import os
from typing import Annotated, ClassVar, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from kvtier.errors import ConfigError
from kvtier.options import Duration, Options
from kvtier_remote.options import HIDING, AbsolutePath, RemoteOptions, Server, read_public, read_secret


class TLSOptions(Options):
    """Options of TLS: the authorities that verify a server's certificate, and the certificate of this process."""

    model_config: ClassVar[ConfigDict] = HIDING

    ca_file: AbsolutePath = Field(description="PEM file of the authorities that sign the server's certificate")
    cert_file: AbsolutePath | None = Field(
        default=None, description="PEM file of this client's certificate, for servers that ask for one"
    )
    key_file: AbsolutePath | None = Field(
        default=None, description="PEM file of its private key, not readable by other users"
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.cert_file is None) != (self.key_file is None):
            raise ValueError("cert_file and key_file go together")
        return self


class ValkeyOptions(RemoteOptions):
    """Type `valkey`: a Valkey or Redis server that any number of processes and hosts use at the same time."""

    SECRETS_FROM: ClassVar[str] = "password_file: or password_env:"
    RIGHTS_KEY: ClassVar[str] = "username"

    type: Literal["valkey"] = "valkey"
    servers: Annotated[list[Server], Field(min_length=1, max_length=64)] = Field(
        description="host:port of the server, and of its replicas if it has any; some nodes of a cluster"
    )
    mode: Literal["standalone", "cluster"] = Field(
        default="standalone", description="cluster: the names are spread over the nodes of a cluster"
    )
    username: str = Field(
        default="", max_length=256, description="user of the server's ACL; the default one when empty"
    )
    password_file: AbsolutePath | None = Field(
        default=None, description="file that holds the password, not readable by other users"
    )
    password_env: str | None = Field(
        default=None, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", description="environment variable that holds the password"
    )
    tls: bool | TLSOptions = Field(
        default=True, description="true: the system's authorities; {ca_file: PATH}: these; false: in clear"
    )
    expire: Duration | None = Field(
        default=None, description="blocks expire this long after they were stored, such as 2d; never when absent"
    )
    connections: int = Field(default=8, ge=1, le=64, description="threads, each with a connection of its own")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.password_file and self.password_env:
            raise ValueError("password_file and password_env are both given; keep one")
        if self.username and not (self.password_file or self.password_env):
            raise ValueError("username needs a password; write password_file: or password_env:")
        return self

    @property
    def expire_seconds(self) -> int | None:
        """After how long the server removes a block: the less of `expire` and `max_age`."""
        return min((time for time in (self.expire, self.max_age) if time is not None), default=None)

    @property
    def password_key(self) -> str:
        """The option that says where the password is."""
        return "password_env" if self.password_env else "password_file"

    def password(self) -> str | None:
        """The password from its file or from the environment; None if the file names neither. Raises ConfigError."""
        if self.password_env:
            found = os.environ.get(self.password_env)
            if not found:
                raise ConfigError(f"the environment variable {self.password_env} is not set", "password_env")
            return found
        return None if self.password_file is None else read_secret(self.password_file, "password_file")

    def authorities(self) -> bytes | None:
        """The PEM file of `tls.ca_file`; None for the system's authorities. Raises ConfigError."""
        return read_public(self.tls.ca_file, "tls.ca_file") if isinstance(self.tls, TLSOptions) else None

    def certificate(self) -> tuple[bytes, bytes] | None:
        """This client's certificate and its key, both PEM; None where the file names none. Raises ConfigError."""
        if not isinstance(self.tls, TLSOptions) or self.tls.cert_file is None or self.tls.key_file is None:
            return None
        key = read_secret(self.tls.key_file, "tls.key_file")
        return read_public(self.tls.cert_file, "tls.cert_file"), f"{key}\n".encode()

"""Options of the tiers `s3`, `gcs` and `azure`. No client library is needed to validate them."""

import re
import ssl
from datetime import UTC, datetime, timedelta
from ipaddress import IPv6Address
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, ConfigDict, Field, model_validator

from kvtier.errors import ConfigError
from kvtier.options import ByteSize, Options, Seconds
from kvtier_remote.options import HIDING, AbsolutePath, RemoteOptions, read_public, read_secret

_ENDPOINT = re.compile(r"https?://(\[([0-9A-Fa-f:.]+)\]|[A-Za-z0-9_.-]+)(:([0-9]{1,5}))?(/[A-Za-z0-9_./-]*)?")


def _endpoint(text: str) -> str:
    match = _ENDPOINT.fullmatch(text)
    if match is None or not 0 < int(match[4] or 1) < 1 << 16 or not (match[2] is None or _is_ipv6(match[2])):
        raise ValueError("that is no endpoint; write it as https://host or https://host:port")
    return text.rstrip("/")


def _is_ipv6(text: str) -> bool:
    try:
        IPv6Address(text)
    except ValueError:
        return False
    return True


Endpoint = Annotated[str, AfterValidator(_endpoint)]
RENEW_SECONDS = 60.0
"""Interval at which files of credentials are read again, so that credentials that expire are replaced while a tier is
open."""
_LIBRARY_AHEAD_SECONDS = 300.0
"""The library asks for new credentials so long before those it has expire."""
Default = Literal["default"]
"""The client library finds the credentials: in the environment, in files of the platform, or from the machine."""


class ObjectOptions(RemoteOptions):
    """Options of every tier on an object store.

    Objects are evicted by their age alone, so that what is written in a day, times the days that it is kept and one
    more, times the processes that write, is the bound.
    """

    SECRETS_FROM: ClassVar[str] = "credentials: with the names of files"
    RIGHTS_KEY: ClassVar[str] = "credentials"
    STORE: ClassVar[str]
    """The class of the client library."""
    BUCKET_KEY: ClassVar[str] = "bucket"
    """The option that names what holds the objects."""
    SCHEMES: ClassVar[tuple[str, ...]] = ()
    """The schemes of its stores' addresses."""

    endpoint: Endpoint | None = Field(
        default=None, description="address of the service, such as https://rgw.kv:7480; the provider's own when absent"
    )
    allow_http: bool = Field(default=False, description="speak in clear with an endpoint of http://")
    ca_file: AbsolutePath | None = Field(
        default=None, description="PEM file of further authorities that sign the service's certificate"
    )
    requests: int = Field(default=64, ge=1, le=1024, description="transfers in flight at once, and as many lookups")
    request_timeout_seconds: Seconds = Field(default=3.0, le=60, description="a request that takes longer has failed")
    inflight_bytes: ByteSize = Field(default=256 << 20, description="bytes of transfers in flight at once, at most")
    expire_days: int | None = Field(
        default=None,
        ge=1,
        le=3650,
        description="days after which the store's lifecycle rule removes blocks; needed unless allow_unbounded",
    )
    hosts: int = Field(default=1, ge=1, le=1 << 20, description="processes that write under the prefix, for the bound")
    renew: bool = Field(default=False, description="a block that is loaded in the second half of its life starts anew")

    @property
    def bucket_name(self) -> str:
        """The name of the bucket or container."""
        name: str = getattr(self, self.BUCKET_KEY)
        return name

    @property
    def finds_credentials(self) -> bool:
        """True if the client library finds the credentials by itself, which may lead it to other hosts."""
        return getattr(self, "credentials", "default") == "default"

    @property
    def bound_bytes(self) -> int | None:
        """The bytes that all processes keep in the store at most; None if nothing bounds it.

        A service removes an object at the end of the day on which it has the age.
        """
        if self.write_bytes_per_day is None or self.expire_days is None:
            return None
        return self.hosts * self.write_bytes_per_day * (self.expire_days + 1)

    def check_bound(self) -> None:
        """Raises ConfigError with the option that a bound lacks, unless none is wanted."""
        if self.allow_unbounded:
            return
        for key, lacks in (("write_bytes_per_day", "a limit of what is written"), ("expire_days", "an age")):
            if getattr(self, key) is None:
                raise ConfigError(f"the store grows without bound; give {lacks}, or write allow_unbounded: true", key)

    def arguments(self) -> dict[str, Any]:
        """The arguments of the client library's class, secrets read from their files. Raises ConfigError."""
        raise NotImplementedError

    def without_encryption(self) -> tuple[str, Self] | None:
        """The option that says how objects are encrypted, and these options without it; None where none says so."""
        return None

    def authorities(self) -> bytes | None:
        """The PEM file of `ca_file`; None for the system's authorities alone. Raises ConfigError."""
        if self.ca_file is None:
            return None
        data = read_public(self.ca_file, "ca_file")
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=data.decode("ascii", "ignore"))
        except (ssl.SSLError, ValueError) as error:
            raise ConfigError(f"{self.ca_file}: holds no certificates in PEM", "ca_file") from error
        return data

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.prefix in (".", ".."):
            raise ValueError(f"prefix: {self.prefix!r} is no name in a bucket")
        if self.endpoint is not None and self.endpoint.startswith("http:") and not self.allow_http:
            raise ValueError("endpoint: http:// sends blocks and names in clear; write allow_http: true to do that")
        if self.renew and self.expire_days is None:
            raise ValueError("renew: half of which life? give expire_days")
        return self


def _expires_at() -> datetime:
    """The end of a key from a file, as the library takes it."""
    return datetime.now(UTC) + timedelta(seconds=_LIBRARY_AHEAD_SECONDS + RENEW_SECONDS)


def _read_line(path: str, key: str) -> str:
    """A secret that goes into a header. Raises ConfigError."""
    secret = read_secret(path, key)
    if not secret.isprintable():
        raise ConfigError(f"{path}: holds more than one line, or signs that are not printed", key)
    return secret


class S3Keys(Options):
    """An access key in two files, neither of which other users can use."""

    model_config: ClassVar[ConfigDict] = HIDING

    access_key_file: AbsolutePath = Field(description="file that holds the access key's id")
    secret_key_file: AbsolutePath = Field(description="file that holds the secret access key")

    def read(self) -> dict[str, Any]:
        """The access key as the library takes it, to be read again after `RENEW_SECONDS`. Raises ConfigError."""
        return {
            "access_key_id": _read_line(self.access_key_file, "credentials.access_key_file"),
            "secret_access_key": _read_line(self.secret_key_file, "credentials.secret_key_file"),
            "expires_at": _expires_at(),
        }


class S3Options(ObjectOptions):
    """Type `s3`: a bucket of Amazon S3, or of a service that speaks its language, such as Ceph."""

    STORE: ClassVar[str] = "S3Store"
    SCHEMES: ClassVar[tuple[str, ...]] = ("s3",)

    type: Literal["s3"] = "s3"
    bucket: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{1,61}[A-Za-z0-9]$", description="name of the bucket")
    region: str | None = Field(
        default=None, pattern=r"^[a-z0-9-]{1,64}$", description="region of the bucket; from the environment when absent"
    )
    credentials: Default | S3Keys = Field(
        default="default", description="default: environment or machine; or access_key_file and secret_key_file"
    )
    encryption: Literal["AES256", "aws:kms"] | None = Field(
        default=None, description="server-side encryption of every object; the bucket's own default when absent"
    )
    kms_key_id: str | None = Field(default=None, max_length=512, description="key of encryption aws:kms")

    @model_validator(mode="after")
    def _check_encryption(self) -> Self:
        if self.kms_key_id is not None and self.encryption != "aws:kms":
            raise ValueError("kms_key_id: goes with encryption: aws:kms")
        return self

    def without_encryption(self) -> tuple[str, Self] | None:
        """See `ObjectOptions`."""
        if self.encryption is None:
            return None
        key = "encryption" if self.kms_key_id is None else "kms_key_id"
        return key, self.model_copy(update={"encryption": None, "kms_key_id": None})

    def arguments(self) -> dict[str, Any]:
        """Payloads are not signed: they carry a checksum of their own."""
        given: dict[str, Any] = {
            "bucket": self.bucket,
            "region": self.region,
            "endpoint": self.endpoint,
            "server_side_encryption": self.encryption,
            "sse_kms_key_id": self.kms_key_id,
        }
        keys = self.credentials
        if isinstance(keys, S3Keys):
            keys.read()  # what is wrong with the files is said now
            given["credential_provider"] = keys.read
        return {"unsigned_payload": True} | {name: value for name, value in given.items() if value is not None}


class GCSKey(Options):
    """A service account's key in a file that other users cannot use."""

    model_config: ClassVar[ConfigDict] = HIDING

    service_account_file: AbsolutePath = Field(description="JSON file of a service account's key")


class GCSOptions(ObjectOptions):
    """Type `gcs`: a bucket of Google Cloud Storage."""

    STORE: ClassVar[str] = "GCSStore"
    SCHEMES: ClassVar[tuple[str, ...]] = ("gs", "gcs")

    type: Literal["gcs"] = "gcs"
    bucket: str = Field(pattern=r"^[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]$", description="name of the bucket")
    credentials: Default | GCSKey = Field(
        default="default", description="default: environment or machine; or service_account_file"
    )

    @property
    def finds_credentials(self) -> bool:
        """Always: a service account's key is exchanged for tokens elsewhere."""
        return True

    def arguments(self) -> dict[str, Any]:
        """The key is read from its file."""
        given = {"bucket": self.bucket}
        if self.endpoint is not None:
            given["base_url"] = self.endpoint
        if isinstance(self.credentials, GCSKey):
            path = self.credentials.service_account_file
            given["service_account_key"] = read_secret(path, "credentials.service_account_file")
        return given


class AzureKey(Options):
    """A storage account's key in a file that other users cannot use."""

    model_config: ClassVar[ConfigDict] = HIDING

    account_key_file: AbsolutePath = Field(description="file that holds the storage account's key")

    def read(self) -> dict[str, Any]:
        """The key as the library takes it, to be read again after `RENEW_SECONDS`. Raises ConfigError."""
        key = read_secret(self.account_key_file, "credentials.account_key_file")
        return {"access_key": key, "expires_at": _expires_at()}


class AzureOptions(ObjectOptions):
    """Type `azure`: a container of Azure Blob Storage."""

    BUCKET_KEY: ClassVar[str] = "container"
    STORE: ClassVar[str] = "AzureStore"
    SCHEMES: ClassVar[tuple[str, ...]] = ("az", "azure")

    type: Literal["azure"] = "azure"
    account: str = Field(pattern=r"^[a-z0-9]{3,24}$", description="name of the storage account")
    container: str = Field(pattern=r"^[a-z0-9][a-z0-9-]{1,61}[a-z0-9]$", description="name of the container")
    credentials: Default | AzureKey = Field(
        default="default", description="default: environment or machine; or account_key_file"
    )

    def arguments(self) -> dict[str, Any]:
        """The arguments for its place and its key."""
        given: dict[str, Any] = {"container_name": self.container, "account_name": self.account}
        if self.endpoint is not None:
            given["endpoint"] = self.endpoint
        if isinstance(self.credentials, AzureKey):
            self.credentials.read()  # what is wrong with the file is said now
            given["credential_provider"] = self.credentials.read
        return given

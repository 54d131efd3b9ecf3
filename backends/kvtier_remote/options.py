"""Options of the remote tiers, as they stand in a stack file. No client library is needed to validate them."""

import os
import re
import stat
from typing import Annotated, Any, ClassVar, Self

from pydantic import AfterValidator, ConfigDict, Field, model_validator

from kvtier.errors import ConfigError
from kvtier.options import ByteSize, MaxAge, Seconds, SharedTierOptions

_SERVER = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+):([0-9]{1,5})")
_SECRET = re.compile(r"pass|pwd|secret|token|(access|account|api|private)_?key|^auth$|^sas", re.IGNORECASE)
"""Names of options that do not exist, and that people give secrets to."""
_SECRET_BYTES_MAX = 16 << 10
_PUBLIC_BYTES_MAX = 4 << 20
"""The authorities that come with a system are a quarter of a MiB."""
_SHOWN = 40


def _server(text: str) -> str:
    match = _SERVER.fullmatch(text)
    if match is None or not 0 < int(match[2]) < 1 << 16:
        raise ValueError("that is no server; write host:port, such as cache-0:6379")
    return text


def _absolute(path: str) -> str:
    if not os.path.isabs(path) or "\0" in path:
        raise ValueError("that is not an absolute path")
    return path


Server = Annotated[str, AfterValidator(_server)]
AbsolutePath = Annotated[str, AfterValidator(_absolute)]


HIDING = ConfigDict(hide_input_in_errors=True)
"""Of models beside whose options people may write a secret: no error shows what was given."""


class RemoteOptions(SharedTierOptions):
    """Options of every tier on a server."""

    model_config: ClassVar[ConfigDict] = HIDING

    SECRETS_FROM: ClassVar[str] = "a file or an environment variable"
    """What a stack file names in place of a secret."""
    RIGHTS_KEY: ClassVar[str] = ""
    """The option that says who this process is to the server."""

    prefix: str = Field(
        default="kvtier",
        max_length=64,
        pattern=r"^[A-Za-z0-9_.-]+$",
        description="in front of every name; the scope of a tenant and of its access rule",
    )
    request_timeout_seconds: Seconds = Field(default=1.0, le=60, description="a request that takes longer has failed")
    job_timeout_seconds: Seconds = Field(
        default=5.0, description="after this a load counts as a miss, a store as dropped"
    )
    close_timeout_seconds: Seconds = Field(default=10.0, description="close waits this long for requests in flight")
    allow_unbounded: bool = Field(default=False, description="use a server that nothing bounds all the same")

    max_age: MaxAge = None
    write_bytes_per_day: ByteSize | None = Field(
        default=None, description="this process writes so much in any 24 hours, at most; no limit when absent"
    )
    state_folder: AbsolutePath | None = Field(
        default=None, description="local folder that keeps the write budget over restarts; without it one starts empty"
    )

    @property
    def open_seconds(self) -> float:
        """The longest time of opening the tier, whatever the server does."""
        return 10 * self.job_timeout_seconds

    @property
    def budget_file(self) -> str | None:
        """The file that keeps the write budget over restarts."""
        return None if self.state_folder is None else os.path.join(self.state_folder, f"{self.label}.budget")

    def share(self, index: int, count: int) -> Self:
        """A state folder for each: a write budget belongs to one process."""
        if count == 1 or self.state_folder is None:
            return self
        return self.model_copy(update={"state_folder": f"{self.state_folder}-{index}"})

    @model_validator(mode="before")
    @classmethod
    def _refuse_secrets(cls, given: Any) -> Any:
        unknown = [key for key in given if key not in cls.model_fields] if isinstance(given, dict) else []
        found = next((key for key in unknown if _SECRET.search(key)), None)
        if found is not None:
            raise ValueError(f"{found[:_SHOWN]}: a stack file holds no secret; write {cls.SECRETS_FROM}")
        return given

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.request_timeout_seconds >= self.job_timeout_seconds:
            raise ValueError("request_timeout_seconds must be less than job_timeout_seconds: a job makes requests")
        if self.state_folder is not None and self.write_bytes_per_day is None:
            raise ValueError("state_folder keeps the write budget; give write_bytes_per_day")
        return self


def read_secret(path: str, key: str) -> str:
    """The text of a file that other users cannot use. Raises ConfigError with the option's name, `key`."""
    try:
        secret = _read(path, key, _SECRET_BYTES_MAX, stat.S_IRWXO).decode().strip("\r\n")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: holds no text", key) from error
    if not secret:
        raise ConfigError(f"{path}: is empty", key)
    return secret


def read_public(path: str, key: str) -> bytes:
    """The bytes of a file that is no secret. Raises ConfigError with the option's name, `key`."""
    return _read(path, key, _PUBLIC_BYTES_MAX)


def _read(path: str, key: str, most: int, refused_mode: int = 0) -> bytes:
    """The bytes of a plain file, at most `most`. Never blocks on a pipe or a device. Raises ConfigError."""
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            mode = os.fstat(file.fileno()).st_mode
            if not stat.S_ISREG(mode):
                raise ConfigError(f"{path}: is no plain file", key)
            if mode & refused_mode:
                raise ConfigError(f"{path}: other users may use it; take that from them (chmod o-rwx)", key)
            data = file.read(most + 1)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}", key) from error
    if len(data) > most:
        raise ConfigError(f"{path}: is larger than {most >> 10} KiB", key)
    return data

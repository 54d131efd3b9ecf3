"""A trial of a pool by `kvtier check`: it takes values and gives them back."""

from __future__ import annotations

import os
import secrets
import time

from kvtier.errors import ConfigError
from kvtier_remote.mooncake.client_process import ClientProcess
from kvtier_remote.mooncake.marker_object import SIZE
from kvtier_remote.mooncake.options import MooncakeOptions
from kvtier_remote.mooncake.outcomes import MISSING_CODES, NO_SPACE, errno_of

_PAUSE_SECONDS = 0.05


def try_pool(connection: ClientProcess, options: MooncakeOptions) -> None:
    """Write a value of a few bytes, read and remove it. Raises ConfigError with the option to look at."""
    name = f"{options.prefix}:b:probe.{secrets.token_hex(8)}"
    try:
        _judge(options, "takes no value", _written(connection, name, options.request_timeout_seconds))
        (length,) = connection.ask("get", [name], [0], [SIZE])
        (removed,) = connection.ask("remove", [name])
    except OSError as error:
        raise ConfigError(f"{options.master}: {error.strerror or 'does not answer'}", options.suspect_key) from None
    _judge(options, "does not give a value back", length)
    _judge(options, "removes no value", removed)


def _written(connection: ClientProcess, name: str, seconds: float) -> int:
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

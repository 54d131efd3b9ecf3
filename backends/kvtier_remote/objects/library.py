"""The client library of object stores, imported when a tier is opened: its stores, and what its errors mean."""

from __future__ import annotations

import asyncio
import errno
import importlib.util
import os
import re
from collections.abc import Awaitable, Callable, Mapping
from datetime import timedelta
from types import MappingProxyType
from typing import Any, TypeVar
from urllib.parse import urlsplit
from urllib.request import getproxies_environment

from kvtier.errors import ConfigError
from kvtier.types.jobs import BlockOutcome, DropReason, dropped, failed
from kvtier_remote.objects.options import ObjectOptions

INSTALL = "needs the package obstore; pip install 'kvtier[objects]'"
Library = Any
"""The module `obstore`."""
Store = Any
"""A store of it: a bucket, or in tests a folder."""
T = TypeVar("T")
NO_HEADERS: Mapping[str, str] = MappingProxyType({})
_STATUS = re.compile(r"status code: ([0-9]{3})")
_DIGITS_MAX = 6
_SYSTEM = re.compile(r"Os \{\s*code: ([0-9]+)")
_ERRNO_OF_STATUS = {
    401: errno.EACCES,
    403: errno.EACCES,
    404: errno.ENOENT,
    408: errno.ETIMEDOUT,
    429: errno.EBUSY,
    503: errno.EBUSY,
    507: errno.ENOSPC,
}
_TEXT_MAX = 1 << 16
"""The part of an error's text that is read: the rest is what the server says."""
_NO_PROXY = "http://127.0.0.1:0"
"""A port that nothing listens on."""
_CREDENTIALS_HOSTS = (
    "169.254.0.0/16",
    "localhost",
    "127.0.0.0/8",
    "amazonaws.com",
    "googleapis.com",
    "microsoftonline.com",
)
"""Hosts where the library finds credentials of its own."""
_CUT = ("IncompleteMessage", "UnexpectedEof", "ConnectionReset")
_NO_ROOM = ("QuotaExceeded", "StorageFull", "InsufficientStorage")


def ended(seconds: float, call: Callable[[], Awaitable[T]]) -> T:
    """The result of a call of the library, for a thread without an event loop. It ends in time, however many requests
    it makes. Raises TimeoutError."""

    async def life() -> T:
        async with asyncio.timeout(seconds):
            return await call()

    return asyncio.run(life())


def installed() -> bool:
    """True if the library is there; it is not imported."""
    return importlib.util.find_spec("obstore") is not None


def library() -> Library:
    """The library. Raises ConfigError if it is not installed."""
    try:
        import obstore
        import obstore.store
    except ImportError as error:
        raise ConfigError(INSTALL, "type") from error
    return obstore


def store_of(options: ObjectOptions, headers: Mapping[str, str] = NO_HEADERS, **more: Any) -> Store:
    """The store of a tier; connects to nothing. `headers` go with each request; `more` goes to the library's class in
    place of what the options say. Raises ConfigError with the option to correct."""
    timeout = timedelta(seconds=options.request_timeout_seconds)
    client: dict[str, Any] = {"timeout": timeout, "connect_timeout": timeout, "allow_http": options.allow_http}
    if headers:
        client["default_headers"] = dict(headers)
    if options.endpoint is not None and not getproxies_environment():
        client |= {"proxy_url": _NO_PROXY, "proxy_excludes": ",".join(_hosts(options.endpoint, options))}
    authorities = options.authorities()
    if authorities is not None:
        client["root_certificate"] = authorities
    kind = getattr(library().store, options.STORE)
    try:
        return kind(**(options.arguments() | more), client_options=client, retry_config={"max_retries": 0})
    except library().exceptions.BaseError:
        raise ConfigError(f"{options.bucket_name}: these are no credentials of such a service", "credentials") from None


def _hosts(endpoint: str, options: ObjectOptions) -> list[str]:
    """The hosts that requests go to. The library follows redirects to any, and has no setting for that; so all others
    are behind a proxy that there is none of."""
    return [urlsplit(endpoint).hostname or "", *(_CREDENTIALS_HOSTS if options.finds_credentials else ())]


def errno_of(error: BaseException) -> int:
    """The errno nearest to an error of the library: one that the system has a name for."""
    text = str(error)[:_TEXT_MAX]
    if status := _STATUS.search(text):
        number = _ERRNO_OF_STATUS.get(int(status[1]), errno.EIO)
        return errno.ENOSPC if number == errno.EACCES and any(word in text for word in _NO_ROOM) else number
    if system := _SYSTEM.search(text):
        number = int(system[1][:_DIGITS_MAX])
        return number if number in errno.errorcode else errno.EIO
    if isinstance(error, TimeoutError) or "TimedOut" in text or "kind: Timeout" in text:
        return errno.ETIMEDOUT
    if any(word in text for word in _CUT):
        return errno.ECONNRESET
    if isinstance(error, FileNotFoundError):
        return errno.ENOENT
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno if error.errno in errno.errorcode else errno.EIO
    return errno.ECONNREFUSED if "kind: Connect" in text else errno.EIO


def os_error(error: BaseException) -> OSError:
    """An error of the library as an OSError. Its text is not kept: it quotes names and addresses."""
    number = errno_of(error)
    return OSError(number, os.strerror(number))


def outcome_of(error: BaseException) -> BlockOutcome:
    """The outcome of a block whose request ended with an error."""
    number = errno_of(error)
    return dropped(DropReason.DISK_FULL) if number in (errno.ENOSPC, errno.EDQUOT) else failed(number)


def refusal(options: ObjectOptions, error: BaseException) -> ConfigError:
    """The reason why a store cannot be used, with the option to look at."""
    text, number = str(error)[:_TEXT_MAX], errno_of(error)
    place = f"{options.bucket_name}: "
    if "AuthorizationHeaderMalformed" in text or "PermanentRedirect" in text or "bucket region" in text:
        return ConfigError(f"{place}the bucket is in another region", "region")
    if number == errno.EACCES:
        return ConfigError(f"{place}the service refuses these credentials, or they may not list objects", "credentials")
    if number == errno.ENOENT:
        return ConfigError(f"{place}there is no such {options.BUCKET_KEY}", options.BUCKET_KEY)
    if "InvalidCertificate" in text:
        return ConfigError("the service's certificate is not trusted; name its authorities", "ca_file")
    if "InvalidMessage" in text:
        return ConfigError("the service does not speak TLS; is it http://, with allow_http: true?", "endpoint")
    if "redential" in text or "/token" in text:
        return ConfigError(f"{place}no credentials were found; give them, or name files that hold them", "credentials")
    if "dns error" in text:
        return ConfigError("the name of the service's host is not known here", "endpoint")
    return ConfigError(f"the service does not answer ({os.strerror(number)})", "endpoint")

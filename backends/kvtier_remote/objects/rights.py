"""A trial of what these credentials may do in a bucket: an empty object is written, read and removed."""

from __future__ import annotations

import errno
import secrets
from collections.abc import Callable

from kvtier.errors import ConfigError
from kvtier_remote.objects.library import Store, errno_of, library, refusal, store_of
from kvtier_remote.objects.options import ObjectOptions

_REFUSED = (errno.EACCES, errno.EIO)
"""What a service answers where it may not encrypt: 403 or 400."""


def check_rights(store: Store, options: ObjectOptions) -> None:
    """Blocking. Leaves nothing behind, unless objects may not be removed. Raises ConfigError with the option that is
    wrong. A store without room passes: it may have some later."""
    name = _own_name(options)
    tried = (
        _tried(options, "write", lambda: library().put(store, name, b"", use_multipart=False)),
        _tried(options, "read", lambda: next(iter(library().get(store, name).stream(1)), None)),
        _tried(options, "remove", lambda: library().delete(store, [name])),
    )
    for problem in tried:
        if problem is not None:
            raise problem


def _own_name(options: ObjectOptions) -> str:
    """A name that no other process uses: services fail some of the requests that race for one. The lifecycle rule
    removes what stays."""
    return f"{options.prefix}/b/probe.{secrets.token_hex(8)}"


def _tried(options: ObjectOptions, what: str, request: Callable[[], object]) -> ConfigError | None:
    """The fault if a request fails."""
    try:
        request()
    except FileNotFoundError:  # it was not written
        return None
    except (OSError, library().exceptions.BaseError) as error:
        number = errno_of(error)
        if number == errno.ENOSPC:
            return None
        if what == "write" and number in _REFUSED and (key := _key_of_encryption(options)):
            reason = "the service does not encrypt so: does it know the key, may these credentials use it, over https?"
            return ConfigError(f"{options.bucket_name}: {reason}", key)
        if number == errno.EACCES:
            reason = f"these credentials may not {what} objects under {options.prefix}/"
            return ConfigError(f"{options.bucket_name}: {reason}", "credentials")
        return refusal(options, error)
    return None


def _key_of_encryption(options: ObjectOptions) -> str:
    """The option that asks for encryption, if the service takes an object without it; else nothing."""
    asked = options.without_encryption()
    if asked is None:
        return ""
    key, plain = asked
    name = _own_name(options)
    try:
        store = store_of(plain)
        library().put(store, name, b"", use_multipart=False)
        library().delete(store, [name])
    except (OSError, library().exceptions.BaseError):
        return ""
    return key

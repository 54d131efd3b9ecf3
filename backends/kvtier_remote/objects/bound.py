"""The bound of an object store, and its cost: for `kvtier check` and for opening."""

import errno
import secrets
from collections.abc import Callable

from kvtier.errors import ConfigError
from kvtier.options import count_text, size_text
from kvtier.types.geometry import Geometry
from kvtier_remote.answers import reading_answers
from kvtier_remote.objects.library import Store, ended, errno_of, library, refusal, store_of
from kvtier_remote.objects.lifecycle import check_rules
from kvtier_remote.objects.options import ObjectOptions
from kvtier_remote.transport import TransportInfo

DOLLARS_PER_PUT = 5.0e-6
DOLLARS_PER_GET = 0.4e-6
"""Requests of S3 Standard in most regions, November 2026; docs/remote.md says where they are from."""
_UNBOUNDED_BYTES = 1 << 62
_GIB = 1 << 30
_REFUSED = (errno.EACCES, errno.EIO)
"""Answers of a service where it may not encrypt: 403 or 400."""


def look_into(store: Store, options: ObjectOptions) -> TransportInfo:
    """Look into the bucket once, at its rules, and at what may be done there. Blocking; leaves nothing behind. Raises
    ConfigError with the option that is wrong."""

    async def look() -> None:
        async for _ in library().list(store, f"{options.prefix}/m", chunk_size=1):
            return

    try:
        with reading_answers():
            ended(options.request_timeout_seconds, look)
    except (OSError, library().exceptions.BaseError) as error:
        raise refusal(options, error) from None
    facts = facts_of(options)
    notes = facts.notes + check_rules(options)
    check_rights(store, options)
    return TransportInfo(facts.capacity_bytes, notes)


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
    """The error of a request that fails."""
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


def facts_of(options: ObjectOptions) -> TransportInfo:
    """The bound as the options state it. Raises ConfigError with the option that it lacks."""
    options.check_bound()
    bound = options.bound_bytes
    if bound is None or options.write_bytes_per_day is None:
        return TransportInfo(_UNBOUNDED_BYTES, ("nothing bounds what is kept in the store",))
    daily = size_text(options.write_bytes_per_day)
    said = f"{options.hosts} x {daily} a day x {options.expire_days} days = {size_text(bound)} at most in the store"
    return TransportInfo(bound, (said,))


def cost_notes(options: ObjectOptions, geometry: Geometry) -> tuple[str, ...]:
    """Requests and dollars, for blocks of the groups' mean size."""
    groups = range(geometry.num_groups)
    size = sum(geometry.aligned_bytes(group) for group in groups) // geometry.num_groups
    requests = -(-_GIB // size)
    notes = [
        f"1 GiB is {count_text(requests)} requests of {size_text(size)}: {requests * DOLLARS_PER_PUT:.4f} $ to write, "
        f"{requests * DOLLARS_PER_GET:.4f} $ to read"
    ]
    if options.write_bytes_per_day is not None:
        daily = -(-options.write_bytes_per_day // size)
        spent = daily * DOLLARS_PER_PUT
        notes.append(f"writing all that is allowed is {count_text(daily)} requests and {spent:.2f} $ a day and process")
    return tuple(notes)

"""The bound of an object store, its lifecycle rule, and its cost: for `kvtier check` and for opening."""

from __future__ import annotations

import errno
import secrets
import ssl
import urllib.error
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import NamedTuple
from xml.etree import ElementTree

from kvtier.errors import ConfigError
from kvtier.options import count_text, size_text
from kvtier.types.geometry import Geometry
from kvtier_remote.answers import digits, reading_answers
from kvtier_remote.bounded_http import get
from kvtier_remote.objects.library import Store, ended, errno_of, library, refusal, store_of
from kvtier_remote.objects.options import ObjectOptions, S3Options
from kvtier_remote.transport import TransportInfo

_VALID_FOR = timedelta(minutes=1)
_ANSWER_BYTES_MAX = 1 << 20
_NOT_FOUND = 404
NOT_READ = "the lifecycle rule was not read"


class Rule(NamedTuple):
    """A rule that removes objects with a prefix a number of days after they were written."""

    prefix: str
    days: int


def check_rules(options: ObjectOptions) -> tuple[str, ...]:
    """Notes for people: that the rules could not be read, and why. Blocking.

    Raises ConfigError for a bucket whose rules can be read and do not bound what is stored, or remove markers.
    """
    if not isinstance(options, S3Options):
        return (f"{NOT_READ}: this service has another interface for it",)
    try:
        with reading_answers():
            rules = list(parsed(_read(options)))
    except (OSError, ElementTree.ParseError) as error:
        reason = f"status {error.code}" if isinstance(error, urllib.error.HTTPError) else type(error).__name__
        return (f"{NOT_READ} ({reason})",)
    require(options, rules)
    return ()


def require(options: ObjectOptions, rules: Sequence[Rule]) -> None:
    """Raises ConfigError for rules that do not bound what is stored, or that remove markers."""
    blocks, markers = f"{options.prefix}/b/", f"{options.prefix}/m/"
    if any(markers.startswith(rule.prefix) for rule in rules):
        reason = f"a lifecycle rule of the bucket removes {markers} as well: resets would be forgotten; name {blocks}"
        raise ConfigError(reason, "prefix")
    days = min((rule.days for rule in rules if blocks.startswith(rule.prefix)), default=None)
    if options.allow_unbounded or (
        days is not None and options.expire_days is not None and days <= options.expire_days
    ):
        return
    found = (
        f"no rule of the bucket removes {blocks}" if days is None else f"the bucket removes {blocks} after {days} days"
    )
    raise ConfigError(f"{found}; add that lifecycle rule, or write allow_unbounded: true", "expire_days")


def _read(options: S3Options) -> bytes:
    """The bucket's rules as the service states them. The library has no call for them, but signs any address that its
    stores lie at: one with a query in it as well."""
    region = options.region or store_of(options).config.get("region", "us-east-1")
    at = f"{options.endpoint}/{options.bucket}" if options.endpoint else _home(options.bucket, region)
    signing = store_of(options, endpoint=f"{at}?lifecycle=&x=", virtual_hosted_style_request=True)
    address = library().sign(signing, "GET", "", _VALID_FOR)
    trust = ssl.create_default_context()
    if options.ca_file is not None:
        trust.load_verify_locations(options.ca_file)
    try:
        return get(address, options.request_timeout_seconds, _ANSWER_BYTES_MAX, trust)
    except urllib.error.HTTPError as error:
        if error.code != _NOT_FOUND:
            raise
        return b"<LifecycleConfiguration/>"


def _home(bucket: str, region: str) -> str:
    return f"https://{bucket}.s3.{region}.amazonaws.com/"


def parsed(text: bytes) -> Iterator[Rule]:
    """The rules that are on, and that remove by prefix and age alone. Raises ParseError, OSError."""
    for rule in ElementTree.fromstring(text).iterfind("{*}Rule"):
        days = rule.findtext("{*}Expiration/{*}Days")
        if rule.findtext("{*}Status") != "Enabled" or days is None or _is_narrower(rule):
            continue
        places = ("{*}Filter/{*}Prefix", "{*}Filter/{*}And/{*}Prefix", "{*}Prefix")
        yield Rule(next((found for at in places if (found := rule.findtext(at))), ""), digits(days.strip()))


def _is_narrower(rule: ElementTree.Element) -> bool:
    """True for a rule that depends on more than the prefix: on tags or sizes."""
    return any(
        rule.find(f".//{{*}}{name}") is not None for name in ("Tag", "ObjectSizeGreaterThan", "ObjectSizeLessThan")
    )


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
    return TransportInfo(facts.capacity_bytes, notes, look_up_before_store=True, probe_prefix=True)


def check_rights(store: Store, options: ObjectOptions) -> None:
    """Blocking. Leaves nothing behind, unless objects may not be removed. Raises ConfigError with the option that is
    wrong. A store without room passes: it may have some later."""
    name = _own_name(options)
    tried = (
        _try_request(options, "write", lambda: library().put(store, name, b"", use_multipart=False)),
        _try_request(options, "read", lambda: next(iter(library().get(store, name).stream(1)), None)),
        _try_request(options, "remove", lambda: library().delete(store, [name])),
    )
    for problem in tried:
        if problem is not None:
            raise problem


def _own_name(options: ObjectOptions) -> str:
    """A name that no other process uses: services fail some of the requests that race for one. The lifecycle rule
    removes what stays."""
    return f"{options.prefix}/b/probe.{secrets.token_hex(8)}"


def _try_request(options: ObjectOptions, what: str, request: Callable[[], object]) -> ConfigError | None:
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
    days = f"({options.expire_days} + 1) days"
    said = f"{options.hosts} x {daily} a day x {days} = {size_text(bound)} at most in the store"
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

"""A check that a bucket's lifecycle rule removes blocks after the days in the options, and nothing else of kvtier."""

from __future__ import annotations

import ssl
import urllib.error
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import NamedTuple
from xml.etree import ElementTree

from kvtier.errors import ConfigError
from kvtier_remote.answers import digits, reading_answers
from kvtier_remote.bounded_http import get
from kvtier_remote.objects.library import library, store_of
from kvtier_remote.objects.options import ObjectOptions, S3Options

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

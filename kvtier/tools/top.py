"""The figures that `kvtier top` shows: readings of a stats socket or a page of metrics, and what two of them give."""

import asyncio
import errno
import http.client
import json
import math
import re
import socket
import struct
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any
from urllib.parse import urlsplit

from kvtier.aio.daemon_pool import DaemonPool
from kvtier.cli.stores import printable
from kvtier.client.inquiry import inquire_text
from kvtier.control.tiers.histogram import HistogramFigures
from kvtier.errors import ResourceError, UsageError
from kvtier.metrics.families import DEFINITIONS, metric_families
from kvtier.stack import StackStats
from kvtier.stack.watching.stats_socket import stats_from_json

TIMEOUT_SECONDS = 5.0
BYTES_MAX, LINES_MAX, LINE_MAX = 16 << 20, 1 << 18, 1 << 14
TIERS_MAX, NAME_MAX, REASON_MAX = 512, 64, 200
VALUE_MAX = float(1 << 63)
"""No figure is larger, and none is negative."""
_COUNTERS = ("hits", "load_bytes", "store_bytes", "evictions")
_DEFINITIONS = {
    each.name: each for each in DEFINITIONS if each.label_names[:1] == ("tier",) or each.figure == "backlog"
}
_OF_ENGINES = {each.name: each for each in DEFINITIONS if each.of_engines}

Value = tuple[str, tuple[str, ...], float]
"""A tier, a figure of `DEFINITIONS` with its other labels, a value. The last label of a bucket is its bound."""

Figures = dict[str, Any]
"""The object that `--json` prints, or one of its tiers. None stands for what is not known."""


@dataclass(frozen=True, slots=True)
class StackReading:
    """Figures by tier, then by figure and labels; those of no tier have the empty one.

    `seconds` is a clock of the source. Where a page shows several stacks, tiers are `stack/tier`. `states` are those
    that the source gives in words. `process` differs where counters begin at zero again. `engines` has the figures of
    a service by engine.
    """

    seconds: float
    figures: Mapping[str, Mapping[tuple[str, ...], float]]
    states: Mapping[str, str] = field(default_factory=dict)
    process: object = None
    written_today_bytes: int | None = None
    engines: Mapping[str, Mapping[tuple[str, ...], float]] = field(default_factory=dict)

    def total(self, tier: str, *first: str) -> float | None:
        """The sum of the figures whose name and labels begin so; None where the source does not have one."""
        return _total(self.figures.get(tier, {}), *first)


def _total(figures: Mapping[tuple[str, ...], float], *first: str) -> float | None:
    values = [value for labels, value in figures.items() if labels[: len(first)] == first]
    return sum(values) if values else None


async def read(address: str) -> StackReading:
    """The figures at the path of a socket or at a URL, within a deadline and a bound.

    Raises UsageError for an address that cannot be one, ResourceError, in one line, where there are no figures.
    """
    if "://" in address:
        _check_url(address)
    thread, call = DaemonPool("kvtier-top", 1), None
    try:
        call = thread.submit(_read_page if "://" in address else _read_socket, address)
        async with asyncio.timeout(2 * TIMEOUT_SECONDS):  # `wait_for` of Python 3.11 may swallow a cancellation
            return await asyncio.wrap_future(call)
    except (OSError, ValueError, http.client.HTTPException, ResourceError) as error:
        reason = "it does not end" if call and not call.done() else _reason(error)
        raise ResourceError(f"{address}: {reason}") from None
    finally:
        thread.shutdown()  # it ends with its call


def _check_url(address: str) -> None:
    try:
        parts = urlsplit(address)
    except ValueError:  # its text may hold a password
        raise UsageError("that is no URL: its host cannot be read; an IPv6 address stands in brackets") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(f"{parts.scheme}://... is not the URL of a page of metrics: give http, https or a socket")
    if parts.username is not None or parts.password is not None:
        raise UsageError("a URL with a user or a password in it is refused, because others can read it here")


def _read_socket(path: str) -> StackReading:
    """The figures of a stats socket, or of the socket of a service."""
    with socket.socket(socket.AF_UNIX) as client:
        connect_limit = struct.pack("ll", int(TIMEOUT_SECONDS), int(TIMEOUT_SECONDS % 1 * 1e6))
        client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, connect_limit)
        try:
            client.connect(path)
        except OSError as error:
            if error.errno != errno.EPROTOTYPE:
                raise
            return from_document(inquire_text(path, "figures", TIMEOUT_SECONDS))
        client.settimeout(TIMEOUT_SECONDS)
        return from_document(_read_all(client.recv))


def _read_page(url: str) -> StackReading:
    request = urllib.request.Request(url, headers={"Accept": "text/plain;version=0.0.4"})
    with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as answer:
        return from_page(_read_all(answer.read1).decode(errors="replace"))


def _read_all(read_some: Callable[[int], bytes]) -> bytes:
    deadline, found = time.monotonic() + TIMEOUT_SECONDS, bytearray()
    while piece := read_some(1 << 16):
        found += piece
        if len(found) > BYTES_MAX:
            raise ResourceError(f"it has more than {BYTES_MAX >> 20} MiB")
        if time.monotonic() > deadline:
            raise ResourceError("it does not end")
    return bytes(found)


def _reason(error: Exception) -> str:
    """The reason of a failed reading, in one line."""
    if isinstance(error, urllib.error.HTTPError):
        error.close()
        return f"the server answers {error.code}"
    if isinstance(error, BlockingIOError):
        return "it accepts no connection"
    words = getattr(error, "reason", error)
    return printable(" ".join(str(getattr(words, "strerror", None) or words).split())[:REASON_MAX])


def from_document(text: bytes) -> StackReading:
    """The figures of a stats socket's document. Raises ResourceError for another text."""
    try:
        document = json.loads(text)
        stats = stats_from_json(document)
        written = document.get("written_today_bytes")
        today = None if written is None else sum(map(int, written.values()))
        states = {_name(tier): _name(figures.breaker) for tier, figures in stats.tiers.items()}
        process = (int(document["process"]), float(document.get("opened_at", 0)))
        figures, engines = _by_name(_values(stats, "tier")), _by_name(_values(stats, "engine"))
        seconds = float(document["seconds"])
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError):
        raise ResourceError("it says something else than a stats socket of kvtier") from None
    today = today if today is not None and 0 <= today <= VALUE_MAX else None
    return StackReading(_clock(seconds), figures, states, process, today, engines)


def _values(stats: StackStats, by: str) -> Iterator[Value]:
    """The figures whose first label is `by`, and those of no tier."""
    for metric, samples in metric_families(stats).items():
        for (tier, *labels), value in samples.items() if metric.label_names[:1] == (by,) else ():
            if isinstance(value, HistogramFigures):
                for bound, count in zip((*value.bounds, math.inf), accumulate(value.counts), strict=True):
                    yield tier, (metric.figure, *labels, str(float(bound))), count
            else:
                yield tier, (metric.figure, *labels), value
    if by == "tier":
        yield "", ("backlog",), stats.backlog


def from_page(page: str) -> StackReading:
    """The figures of all stacks on a page of metrics. Raises ResourceError for another page."""
    try:
        from prometheus_client.parser import text_string_to_metric_families
    except ImportError:
        raise UsageError("a page of metrics needs `pip install 'kvtier[metrics]'`") from None
    if page.count("\n") > LINES_MAX or max(map(len, page.split("\n"))) > LINE_MAX:
        raise ResourceError(f"the page has more than {LINES_MAX} lines, or one of more than {LINE_MAX} characters")
    now = time.monotonic()
    try:
        families = [each for each in text_string_to_metric_families(page) if each.name.startswith("kvtier_")]
        samples = [each for family in families for each in family.samples]
        figures, engines = _by_name(_values_of_stacks(samples)), _by_name(_values_of_engines(samples))
    except (ValueError, LookupError):
        raise ResourceError("it is no page of metrics") from None
    if not families:
        raise ResourceError("there are no metrics of kvtier on this page")
    return StackReading(_clock(now), figures, engines=engines)


def _values_of_engines(samples: Iterable[Any]) -> Iterator[Value]:
    for sample in samples:
        if definition := _OF_ENGINES.get(sample.name):
            engine, *labels = (sample.labels.get(name, "") for name in definition.label_names)
            yield engine, (definition.figure, *labels), sample.value


def _values_of_stacks(samples: Iterable[Any]) -> Iterator[Value]:
    """The values of a page. The name of a stack is made of the labels in which it differs from the others."""
    known = [(found, each) for each in samples if (found := _DEFINITIONS.get(each.name.removesuffix("_bucket")))]
    others = [{item for item in each.labels.items() if item[0] not in (*of.label_names, "le")} for of, each in known]
    alike = set[tuple[str, str]].intersection(*others) if others else set()
    for (definition, sample), other in zip(known, others, strict=True):
        stack, tier = ",".join(text for _, text in sorted(other - alike)), sample.labels.get("tier", "")
        labels = [sample.labels.get(name, "") for name in definition.label_names[1:]]
        if definition.bounds:
            labels.append(str(float(sample.labels["le"])))
        yield (f"{stack}/{tier}" if stack and tier else tier), (definition.figure, *labels), sample.value


def _by_name(values: Iterable[Value]) -> dict[str, dict[tuple[str, ...], float]]:
    """Figures by tier or engine of the values that may be shown: short printable labels, and sound values."""
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for tier, labels, value in values:
        if 0 <= value <= VALUE_MAX:
            own, key = found.setdefault(_name(tier), {}), tuple(map(_name, labels))
            own[key] = own.get(key, 0) + value
    if len(found) > TIERS_MAX:
        raise ResourceError(f"it has {len(found)} tiers or engines, more than the {TIERS_MAX} that can be shown")
    return found


def _name(text: str) -> str:
    return printable(text[:NAME_MAX]) if text else ""


def _clock(seconds: float) -> float:
    if not 0 <= seconds <= VALUE_MAX:
        raise ResourceError("its clock is none")
    return round(seconds, 3)


def is_restart(before: StackReading, now: StackReading) -> bool:
    """True if counters began at zero again in between: another process, or one that opened its stack again."""
    fell = (_growth(before, now, tier, figure) < 0 for figure in _COUNTERS for tier in now.figures)
    return before.process != now.process or any(fell)


def snapshot(now: StackReading, before: StackReading | None = None, base: StackReading | None = None) -> Figures:
    """The figures to show. Rates are per second since `before`, counts since `base`, or else since the start.

    A quantile is the upper bound of its bucket, infinite for the last one. `written_bytes` counts what was written to
    the devices of lower tiers since the start.
    """
    tiers = [tier for tier in now.figures if tier]
    written = [each for tier in tiers if (each := now.total(tier, "written_bytes")) is not None]
    largest = [
        v for tier in tiers for (figure, *_), v in now.figures[tier].items() if figure.endswith("largest_queued_bytes")
    ]
    return {
        "tiers": [_tier(tier, now, before, base) for tier in tiers],
        "backlog_blocks": now.total("", "backlog"),
        "largest_queued_bytes": max(largest, default=None),
        "written_bytes": sum(written) if written else None,
        "written_today_bytes": now.written_today_bytes,
        "engines": [_engine(name, now, before, base) for name in now.engines],
    }


def _engine(name: str, now: StackReading, before: StackReading | None, base: StackReading | None) -> Figures:
    """Figures of an engine of a service: the share of the blocks looked up that it loaded, and rates in blocks."""

    def growth(start: StackReading | None, figure: str) -> float:
        then = start.engines.get(name, {}) if start else {}
        return (_total(now.engines[name], figure) or 0) - (_total(then, figure) or 0)

    seconds = now.seconds - before.seconds if before else 0
    looked_up = growth(base, "looked_up")
    return {
        "engine": name,
        "hit_share": min(1.0, max(0.0, growth(base, "loaded") / looked_up)) if looked_up > 0 else None,
        "loads_per_second": growth(before, "loaded") / seconds if seconds > 0 else None,
        "stores_per_second": growth(before, "stored") / seconds if seconds > 0 else None,
        "held_rows": _total(now.engines[name], "held_rows"),
        "revoked_rows": growth(base, "revoked_rows"),
    }


def _tier(tier: str, now: StackReading, before: StackReading | None, base: StackReading | None) -> Figures:
    seconds = now.seconds - before.seconds if before else 0

    def rate(*first: str) -> float | None:
        return _growth(before, now, tier, *first) / seconds if seconds > 0 else None

    drops = {labels[1]: rate(*labels) or 0 for labels in now.figures[tier] if labels[0] == "dropped"}
    drops = {reason: each for reason, each in drops.items() if each > 0}
    p50, p99 = _load_quantiles(tier, now, base)
    return {
        "tier": tier,
        "state": _state(tier, now),
        "used_bytes": now.total(tier, "used_bytes"),
        "capacity_bytes": now.total(tier, "capacity_bytes"),
        "hit_share": _hit_share(tier, now, base),
        "load_bytes_per_second": rate("load_bytes"),
        "store_bytes_per_second": rate("store_bytes"),
        "load_p50_seconds": p50,
        "load_p99_seconds": p99,
        "in_flight_bytes": now.total(tier, "transfers.in_flight_bytes"),
        "queued_bytes": now.total(tier, "transfers.queued_bytes"),
        "evictions_per_second": rate("evictions"),
        "drops_per_second": None if before is None else sum(drops.values()),
        "top_drop_reason": max(drops, key=lambda each: drops[each], default=None),
        "errors": _growth(base, now, tier, "errors"),
        "coldest_seconds": now.total(tier, "coldest_seconds"),
    }


def _growth(start: StackReading | None, now: StackReading, tier: str, *first: str) -> float:
    return (now.total(tier, *first) or 0) - ((start and start.total(tier, *first)) or 0)


def _state(tier: str, now: StackReading) -> str:
    """The worst state of the tier's breakers. On a page a tier without breakers is up or not, and one that is not used
    although they are closed, because its I/O is stuck, is down."""
    words = now.states.get(tier)
    found = {labels[-1] for labels, value in now.figures[tier].items() if labels[0] == "breaker_states" and value}
    found = found if words is None else {*re.findall(r"\w+", words)}
    worst = next((state for state in ("held_back", "open", "half_open") if state in found), None)
    if worst is not None or words is not None:
        return worst or words or "up"
    if now.total(tier, "joined") == 0:
        return "held_back"
    return "down" if now.total(tier, "up") == 0 else "closed" if found else "up"


def _hit_share(tier: str, now: StackReading, base: StackReading | None) -> float | None:
    """The share of the blocks that were looked up in the tier's stack which were found in this tier."""
    stack = tier.rpartition("/")[0]
    looked_up = max(_growth(base, now, each, "looked_up") for each in now.figures if each.rpartition("/")[0] == stack)
    if now.total(tier, "looked_up") is None or looked_up <= 0:
        return None
    found = _growth(base, now, tier, "looked_up") - _growth(base, now, tier, "missed")
    return min(1.0, max(0.0, found / looked_up))


def _load_quantiles(tier: str, now: StackReading, base: StackReading | None) -> list[float | None]:
    """The bounds of the buckets that hold half and 99 % of the loads; None without loads."""
    took = [labels for labels in now.figures[tier] if labels[:2] == ("transfers.took_seconds", "load")]
    counts = sorted((float(labels[-1]), _growth(base, now, tier, *labels)) for labels in took)
    if not counts or counts[-1][1] <= 0:
        return [None, None]
    return [
        next((bound for bound, count in counts if count >= share * counts[-1][1]), math.inf) for share in (0.5, 0.99)
    ]

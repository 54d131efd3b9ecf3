"""Spans of jobs: one for each job of a tier, as long as the job, without anything of a user, and at no job's cost."""

from __future__ import annotations

import dataclasses
import errno
import time
from collections import Counter
from pathlib import Path

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from support_joining import Driver
from support_stack import PLAIN, Engine, fs, keys, parts_of, stack_file, until
from support_stack_tiers import backends

from kvtier.stack import TierStack
from kvtier.types.jobs import failed

NAMES = {"tier", "direction", "row_bytes", "waited_seconds"}


class Traced:
    """A provider that keeps spans, and a tracer of it."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self._provider = TracerProvider()
        self._provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer = self._provider.get_tracer("a program")

    def spans(self) -> tuple[ReadableSpan, ...]:
        return self._exporter.get_finished_spans()

    def counted(self) -> Counter[tuple[object, object]]:
        """How many spans there are by tier and direction."""
        return Counter((one.attributes["kvtier.tier"], one.attributes["kvtier.direction"]) for one in self.spans())


def test_each_job_of_each_tier_has_a_span_of_its_time(tmp_path: Path) -> None:
    traced, engine, before = Traced(), Engine(PLAIN, 64), time.time_ns()
    parts = dataclasses.replace(parts_of(stack_file(PLAIN, 8, fs(tmp_path / "root")), engine), tracer=traced.tracer)
    names = keys(8)
    with Driver(parts, engine) as stack:
        assert stack.store(names) == ["stored"] * 8
        stack.drain()
        stack.refill(keys(8, tag="other"))
        assert stack.load(names) == ["loaded"] * 8
        tiers = stack.stack.stats().tiers
        queues = stack.stack._assembled.dispatcher.queues
        stack.until(lambda: not any(queue.running for queue in queues))
    after = time.time_ns()
    counted = traced.counted()
    jobs = {
        (name, kind): one.took_seconds.count for name, tier in tiers.items() for kind, one in tier.transfers.items()
    }
    assert counted == {place: count for place, count in jobs.items() if count}
    assert set(counted) == {(name, kind) for name in ("cpu", "fs") for kind in ("load", "store")}
    moved: Counter[str] = Counter()
    for span in traced.spans():
        attributes = {name.removeprefix("kvtier."): value for name, value in span.attributes.items()}
        assert span.name == f"kvtier {attributes['direction']} {attributes['tier']}"
        assert before - 1_000_000 <= span.start_time <= span.end_time <= after + 1_000_000
        assert 0 <= attributes["waited_seconds"] <= (span.end_time - span.start_time) / 1e9 + 1e-3
        assert (span.parent, span.status.status_code) == (None, StatusCode.UNSET)
        counts = {name: value for name, value in attributes.items() if name not in NAMES}
        assert set(counts) <= {"stored_blocks", "loaded_blocks", "present_blocks"}
        moved.update({f"{attributes['tier']} {name}": value for name, value in counts.items()})
    assert moved["fs loaded_blocks"] == tiers["fs"].loaded == 8
    assert moved["fs stored_blocks"] == tiers["fs"].stored
    for key in names:
        assert bytes(key).hex() not in str([span.to_json() for span in traced.spans()])


async def test_a_job_that_fails_is_an_error_and_one_that_is_late_has_its_whole_time() -> None:
    traced, engine = Traced(), Engine(PLAIN, 64)
    config = stack_file(PLAIN, 32, {"type": "memory", "job_timeout_seconds": 0.5}, backends=backends())
    parts = dataclasses.replace(parts_of(config, engine, backends()), tracer=traced.tracer)
    tier = parts.tiers[-1]
    async with TierStack(parts) as stack:
        tier.spoil = lambda kind, key: failed(errno.EIO)
        await stack.store(keys(4), gpu_blocks=range(4))
        await until(lambda: traced.counted()["memory", "store"] == 1)
        (span,) = [one for one in traced.spans() if one.attributes["kvtier.tier"] == "memory"]
        assert span.status.status_code is StatusCode.ERROR
        assert span.attributes["kvtier.failed_blocks"] == 4
        tier.hold(*tier.gates)
        tier.spoil = lambda kind, key: None
        await stack.store(keys(4, start=10), gpu_blocks=range(4))
        await until(lambda: stack.stats().tiers["memory"].late == 4)
        late_at = time.time_ns()
        tier.let_go()
        await until(lambda: traced.counted()["memory", "store"] == 2)
        *_, last = [one for one in traced.spans() if one.attributes["kvtier.tier"] == "memory"]
        assert last.end_time >= late_at - 10_000_000, "of another clock, set at the start"


def test_a_provider_that_raises_costs_no_job_anything(tmp_path: Path) -> None:
    class Broken:
        def start_span(self, *arguments: object, **more: object) -> None:
            raise RuntimeError("no provider")

    engine, names = Engine(PLAIN, 64), keys(8)
    parts = dataclasses.replace(parts_of(stack_file(PLAIN, 8, fs(tmp_path / "root")), engine), tracer=Broken())
    with Driver(parts, engine) as stack:
        assert stack.store(names) == ["stored"] * 8
        stack.drain()
        assert stack.load(names) == ["loaded"] * 8
        assert stack.stack.stats().errors >= 3

"""The exporter: what a scrape over HTTP shows, in each format that Prometheus asks for."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest
from click.testing import CliRunner
from prometheus_client import CollectorRegistry, Gauge, generate_latest
from support_driver import ServedStack
from support_pages import FORMATS, PLAIN_ONLY, PROMETHEUS_2, Scrape, samples
from support_programs import needs
from support_stack import PLAIN, Engine, fs, keys, load, parts_of, running, stack_file, store, whole

from kvtier.cli import main
from kvtier.control.tiers.histogram import Histogram, HistogramFigures
from kvtier.metrics import DEFINITIONS
from kvtier.metrics.exporter import StackCollector, metrics_server
from kvtier.stack import StackStats, TierStats
from kvtier.stack.dispatcher import TransferStats
from kvtier.tools.top import read


def fetch(port: int, accept: str) -> tuple[str, str]:
    """The page and its content type."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers={"Accept": accept})
    with urllib.request.urlopen(request) as page:
        return page.read().decode(), page.headers["Content-Type"]


def of_tier(found: Scrape, name: str, **labels: str) -> float:
    return found[name, tuple(sorted(labels.items()))]


async def test_a_scrape_shows_what_the_stack_did(tmp_path: Path) -> None:
    engine = Engine(PLAIN, 16)
    some = whole(keys(8))
    async with running(stack_file(PLAIN, 8, fs(tmp_path / "root")), engine) as stack:
        with metrics_server(stack.stats, 0) as port:
            assert (await store(stack, engine, some)).ok
            await stack.drain(30)
            assert (await load(stack, engine, some)).ok
            found = samples(*await asyncio.to_thread(fetch, port, PROMETHEUS_2))
        stats = stack.stats()
    assert of_tier(found, "kvtier_stored_blocks_total", tier="cpu") == 8
    assert of_tier(found, "kvtier_stored_blocks_total", tier="fs") == 8
    assert of_tier(found, "kvtier_hit_blocks_total", tier="cpu") == 8
    assert of_tier(found, "kvtier_group_blocks_total", direction="store", group="0") == 8
    assert of_tier(found, "kvtier_group_blocks_total", direction="load", group="0") == 8
    assert of_tier(found, "kvtier_load_bytes_total", tier="cpu") == 8 * 4096 == stats.tiers["cpu"].load_bytes
    assert of_tier(found, "kvtier_slots", tier="fs", state="ready") == 8


def histogram(*values: float) -> HistogramFigures:
    counting = Histogram()
    for value in values:
        counting.observe(value)
    return counting.figures()


TRANSFERS = TransferStats(histogram(0.003, 0.3, 300.0), histogram(), 10, 11, {"queued": 12})


def some_stats() -> StackStats:
    tiers = {
        name: TierStats(
            hits=number,
            transfers={"load": TRANSFERS},
            dropped={"no_slot": 4},
            slots={"ready": 5},
            curve_missed={"0.5": 6},
        )
        for number, name in enumerate(("cpu", "a disk"), start=1)
    }
    return StackStats(tiers, backlog=7, events_lost=8)


def test_names_and_values_are_the_same_for_every_format() -> None:
    with metrics_server(some_stats, 0) as port:
        pages = [fetch(port, accept) for accept in FORMATS]
    assert [content_type.split(";")[0] for _, content_type in pages] == [
        "application/openmetrics-text",
        "application/openmetrics-text",
        "text/plain",
        "text/plain",
    ]
    found = [samples(*page) for page in pages]
    assert found[0] == found[1] == found[2] == found[3]
    assert of_tier(found[0], "kvtier_hit_blocks_total", tier="a disk") == 2
    assert of_tier(found[0], "kvtier_transfer_seconds_bucket", tier="cpu", direction="load", le="0.005") == 1
    assert of_tier(found[0], "kvtier_transfer_seconds_bucket", tier="cpu", direction="load", le="60.0") == 2
    assert of_tier(found[0], "kvtier_transfer_seconds_bucket", tier="cpu", direction="load", le="+Inf") == 3
    assert of_tier(found[0], "kvtier_transfer_seconds_sum", tier="cpu", direction="load") == 300.303
    assert not any(":" in name or name.endswith("_created") for name, _ in found[0])


def test_every_metric_is_described_without_reading_figures() -> None:
    def never() -> StackStats:
        raise AssertionError("figures were read")

    described = StackCollector(never).describe()
    assert [family.documentation for family in described] == [definition.help for definition in DEFINITIONS]
    CollectorRegistry().register(StackCollector(never))


def test_metrics_of_the_program_stand_beside_those_of_the_stack() -> None:
    registry = CollectorRegistry()
    Gauge("requests_waiting", "Requests of the program.", registry=registry).set(3)
    registry.register(StackCollector(some_stats))
    found = samples(generate_latest(registry).decode(), "text/plain")
    assert of_tier(found, "requests_waiting") == 3
    assert of_tier(found, "kvtier_backlog_blocks") == 7


def test_a_scrape_runs_in_a_thread_of_the_server() -> None:
    threads = []

    def stats() -> StackStats:
        threads.append(threading.current_thread())
        return some_stats()

    with metrics_server(stats, 0) as port:
        fetch(port, PLAIN_ONLY)
    assert threads
    assert threading.main_thread() not in threads


def calls_of(step: Callable[[], object]) -> int:
    """How many functions of Python a call runs in this thread."""
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        step()
    finally:
        sys.setprofile(None)
    return calls


def test_scrapes_and_readers_of_the_socket_add_no_call_to_the_engines_thread(short_folder: str) -> None:
    path = f"{short_folder}/s"
    parts = parts_of(stack_file(PLAIN, 16, stats_socket=path), Engine(PLAIN, 8))
    with ServedStack(parts) as stack, metrics_server(stack.served.stats, 0) as port:
        before, during, until = set(), set(), time.monotonic() + 1.0
        while time.monotonic() < until:  # a step does more from time to time
            before.add(calls_of(stack.step))
        for _ in range(3):
            for read_once in (lambda: fetch(port, PLAIN_ONLY), lambda: asyncio.run(read(path))):
                reader = threading.Thread(target=read_once)
                reader.start()
                while reader.is_alive():
                    during.add(calls_of(stack.step))
                reader.join()
                during.add(calls_of(stack.step))
    assert max(during) <= max(before)


@pytest.mark.prometheus
def test_promtool_has_nothing_to_say(request: pytest.FixtureRequest) -> None:
    needs(request, "prometheus", "promtool")
    with metrics_server(some_stats, 0) as port:
        page, _ = fetch(port, PLAIN_ONLY)
    checked = subprocess.run(["promtool", "check", "metrics"], input=page, capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


def test_a_replay_serves_its_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pages: list[str] = []
    import kvtier.metrics.exporter as exporter

    serve = exporter.metrics_server

    def scraping(stats, port, host="127.0.0.1"):
        class Scraped:
            def __enter__(self) -> None:
                self.server = serve(stats, port, host)
                self.port = self.server.__enter__()

            def __exit__(self, *error: object) -> None:
                pages.append(fetch(self.port, PLAIN_ONLY)[0])
                self.server.__exit__(*error)

        return Scraped()

    monkeypatch.setattr(exporter, "metrics_server", scraping)
    figures = tmp_path / "figures.json"
    small = ("--requests", "6", "--block-bytes", "8KiB", "--cpu-blocks", "64", "--fs-blocks", "256")
    ended = CliRunner().invoke(main, ["replay", "--metrics-port", "0", "--json", str(figures), *small])
    assert ended.exit_code == 0, ended.output
    found = samples(pages[0], "text/plain")
    tiers = json.loads(figures.read_text())["tiers"]
    assert of_tier(found, "kvtier_stored_blocks_total", tier="fs") == tiers["fs"]["stored"] > 0


def test_a_port_in_use_is_one_line(tmp_path: Path) -> None:
    with metrics_server(some_stats, 0) as port:
        ended = CliRunner().invoke(main, ["replay", "--metrics-port", str(port), "--requests", "1"])
    assert ended.exit_code == 2
    assert "--metrics-port" in ended.output

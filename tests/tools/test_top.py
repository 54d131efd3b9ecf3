"""`kvtier top`: figures from a socket and from pages of metrics, rates, counts since a reset, what cannot be read."""

from __future__ import annotations

import asyncio
import http.server
import json
import math
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from prometheus_client import CollectorRegistry, generate_latest
from rich.console import Console
from support_driver import ServedStack
from support_stack import PLAIN, Engine, parts_of, stack_file

from kvtier.cli import main
from kvtier.control.tiers.breaker import BreakerState
from kvtier.control.tiers.histogram import HistogramFigures
from kvtier.errors import ResourceError
from kvtier.metrics.exporter import StackCollector, metrics_server
from kvtier.stack import StackStats, TierStats
from kvtier.stack.dispatcher import TransferStats
from kvtier.stack.watching.stats import BreakerStats
from kvtier.tools import top as source
from kvtier.tools.commands.top import SORTS, View
from kvtier.tools.top import StackReading, from_document, from_page, is_restart, snapshot

MIB = 1 << 20


def histogram(*counts: int) -> HistogramFigures:
    return HistogramFigures((0.001, 0.01), counts, (0.0,) * len(counts))


def transfers(*counts: int, in_flight: int = 0) -> TransferStats:
    return TransferStats(histogram(*counts), histogram(0, 0, 0), in_flight, 2 * in_flight, {}, 0.0, 7)


CPU = {"looked_up": 100, "missed": 60, "used_bytes": 3 * MIB, "capacity_bytes": 4 * MIB, "load_bytes": 10 * MIB}
DISK = {"looked_up": 60, "missed": 40, "store_bytes": 8 * MIB, "breaker": "load open, store closed", "failed": 2}


def figures(cpu: dict[str, object] | None = None, disk: dict[str, object] | None = None) -> StackStats:
    tiers = {"cpu": TierStats(**(CPU | (cpu or {}))), "disk": TierStats(**(DISK | (disk or {})))}  # type: ignore[arg-type]
    return StackStats(tiers, backlog=7)


def reading(stats: StackStats, seconds: float = 0.0, process: int = 1) -> StackReading:
    document = {"seconds": seconds, "process": process, "opened_at": 1.0, "written_today_bytes": {}}
    return from_document(json.dumps({**document, "stats": asdict(stats)}).encode())


def page(stats: StackStats) -> str:
    registry = CollectorRegistry()
    registry.register(StackCollector(lambda: stats))
    return generate_latest(registry).decode()


@pytest.fixture
def path(short_folder: str) -> str:
    """Of a socket."""
    return f"{short_folder}/s"


def top(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["top", *arguments])


def refused(address: str) -> str:
    """The one line about an address that cannot be read."""
    result = top(address, "--once", "--interval", "0")
    assert (result.exit_code, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    return line


# -- figures -----------------------------------------------------------------------------------------------------------


def test_rates_are_between_two_readings_and_counts_since_the_start_or_a_reset() -> None:
    before = reading(figures(disk={"dropped": {"backlog": 4, "disk_full": 9}}), 10.0)
    later = figures(
        {"load_bytes": 14 * MIB, "evictions": 6, "looked_up": 200, "missed": 60},
        {"dropped": {"backlog": 4, "disk_full": 19, "no_slot": 2}, "failed": 5},
    )
    now = reading(later, 12.0)
    cpu, disk = snapshot(now, before)["tiers"]
    assert (cpu["load_bytes_per_second"], cpu["evictions_per_second"], cpu["hit_share"]) == (2 * MIB, 3, 0.7)
    assert (disk["drops_per_second"], disk["top_drop_reason"]) == (6, "disk_full")
    assert (disk["errors"], disk["hit_share"]) == (5, 0.1)
    cpu, disk = snapshot(now, before, base=before)["tiers"]
    assert (cpu["hit_share"], disk["errors"]) == (1.0, 3)
    assert snapshot(now)["tiers"][0]["load_bytes_per_second"] is None
    assert snapshot(now, now)["tiers"][0]["load_bytes_per_second"] is None, "no time has passed"


def test_the_state_is_that_of_the_worst_breaker() -> None:
    states = ["closed", "load half_open, store closed", "held_back", "open: I/O is stuck", "load open, store half_open"]
    found = [snapshot(reading(figures({"breaker": each})))["tiers"][0]["state"] for each in states]
    assert found == ["closed", "half_open", "held_back", "open", "open"]


@pytest.mark.parametrize("where", ["socket", "page"])
@pytest.mark.parametrize(
    ("load", "store", "shown"),
    [
        ("closed", "closed", "closed"),
        ("half_open", "closed", "half_open"),
        ("half_open", "open", "open"),
        ("held_back", "held_back", "held_back"),
    ],
)
def test_a_page_and_a_socket_show_the_same_state(load: str, store: str, shown: str, where: str) -> None:
    breakers = {
        what: BreakerStats(state, {each.value: 0 for each in BreakerState})
        for what, state in (("load", load), ("store", store))
    }
    words = load if load == store else f"load {load}, store {store}"
    stats = figures(disk={"breakers": breakers, "breaker": words, "joined": int(load != "held_back")})
    found = reading(stats) if where == "socket" else from_page(page(stats))
    assert snapshot(found)["tiers"][1]["state"] == shown


def test_a_page_says_that_a_tier_is_down_whose_breakers_are_closed() -> None:
    closed = {"load": BreakerStats("closed", {each.value: 0 for each in BreakerState})}
    stuck = figures(disk={"breakers": closed, "breaker": "open: I/O is stuck"})
    assert snapshot(from_page(page(stuck)))["tiers"][1]["state"] == "down"


def test_quantiles_are_of_the_loads_since_the_reset() -> None:
    before = reading(figures({"transfers": {"load": transfers(0, 50, 50)}}))
    now = reading(figures({"transfers": {"load": transfers(98, 52, 50, in_flight=5), "store": transfers(0, 9, 0)}}))
    (cpu, disk) = snapshot(now, base=before)["tiers"]
    assert (cpu["load_p50_seconds"], cpu["load_p99_seconds"]) == (0.001, 0.01)
    assert (cpu["in_flight_bytes"], cpu["queued_bytes"]) == (5, 10)
    assert (disk["load_p50_seconds"], disk["in_flight_bytes"]) == (None, None)
    assert snapshot(now)["largest_queued_bytes"] == 7
    (cpu, _) = snapshot(reading(figures({"transfers": {"load": transfers(0, 0, 1)}})))["tiers"]
    assert cpu["load_p50_seconds"] == math.inf, "beyond all buckets"


@pytest.mark.parametrize("change", [{"process": 2}, {"stats": figures({"load_bytes": 0})}])
def test_counters_that_begin_anew_give_no_negative_rate(change: dict[str, object]) -> None:
    now = reading(**({"stats": figures(), "seconds": 5.0} | change))  # type: ignore[arg-type]
    before = reading(figures(), 4.0)
    assert is_restart(before, now)
    assert not is_restart(before, reading(figures(), 5.0))
    view = View("here", before)
    view.on_key("r")
    view.on_reading(now)
    shown = text(view)
    assert "since reset" not in shown
    assert "-0" not in shown


def test_a_page_says_what_a_socket_says() -> None:
    stats = figures({"transfers": {"load": transfers(1, 2, 3, in_flight=4)}, "dropped": {"no_slot": 3}})
    found = from_page(page(stats))
    expected = reading(stats)
    for tier, samples in expected.figures.items():
        for labels, value in samples.items():
            assert found.figures[tier][labels] == value, (tier, labels)
    states = [row["state"] for row in snapshot(found)["tiers"]]
    assert states == ["up", "down"]


def test_stacks_of_one_page_are_told_apart_by_the_labels_in_which_they_differ() -> None:
    lines = []
    for engine, looked_up in (("0", 10), ("1", 40)):
        labels = f'engine="{engine}",model_name="m",tier="cpu"'
        lines += [f"kvtier_looked_up_blocks_total{{{labels}}} {looked_up}", f"kvtier_missed_blocks_total{{{labels}}} 5"]
        lines += [f'kvtier_backlog_blocks{{engine="{engine}",model_name="m"}} 2']
    found = snapshot(from_page("\n".join(lines) + "\n"))
    assert {row["tier"]: row["hit_share"] for row in found["tiers"]} == {"0/cpu": 0.5, "1/cpu": 0.875}
    assert found["backlog_blocks"] == 4
    one = from_page("\n".join(lines[:3]) + "\n")
    assert [row["tier"] for row in snapshot(one)["tiers"]] == ["cpu"]


def test_a_page_without_a_value_yet_is_an_empty_table() -> None:
    found = from_page("# HELP kvtier_used_bytes Bytes.\n# TYPE kvtier_used_bytes gauge\n")
    assert snapshot(found)["tiers"] == []


# -- the screen --------------------------------------------------------------------------------------------------------


def text(view: View, width: int = 80) -> str:
    console = Console(width=width, height=50, file=None, record=True, quiet=False)
    with console.capture() as captured:
        console.print(view.render())
    return captured.get()


@pytest.mark.parametrize("width", [80, 130])
def test_the_screen_fits_its_width(width: int) -> None:
    large = {"used_bytes": 1_999 << 30, "capacity_bytes": 15 << 40, "store_bytes": 900 << 40, "failed": 123_456}
    slow = {"load": TransferStats(histogram(0, 0, 9), histogram(0, 0, 0), 1 << 40, 1 << 40, {})}
    view = View(
        "http://a-host-with-a-name:8000/metrics",
        reading(figures(disk=large | {"transfers": slow, "breaker": "half_open"}), 1.0),
    )
    grown = {
        "load_bytes": 30_000 * MIB,
        "store_bytes": (901 << 40),
        "evictions": 99_999,
        "dropped": {"disk_full": 99_999},
    }
    view.on_reading(reading(figures(disk=large | grown | {"transfers": slow, "breaker": "half_open"}), 2.0))
    shown = text(view, width)
    assert max(map(len, shown.splitlines())) <= width
    for word in ("half_open", "disk_full", "123456", ">max", "30000", "99999"):
        assert word in shown, shown
    assert "…" not in shown, shown


def test_keys_sort_freeze_and_reset() -> None:
    view = View("here", reading(figures(), 1.0))
    for sort in [*list(SORTS)[1:], "stack"]:
        view.on_key("s")
        assert f"by {sort}" in text(view)
    view.on_key("f")
    frozen = text(view)
    view.on_reading(reading(figures(disk={"failed": 777}), 2.0))
    assert text(view) == frozen
    view.on_key("f")
    assert "777" in text(view)
    view.on_key("r")
    assert "777" not in text(view)
    shown = text(view)
    view.on_key("x")
    assert text(view) == shown


def test_sorting_moves_tiers() -> None:
    view = View("here", reading(figures()))
    while view.sort != "errors":
        view.on_key("s")
    shown = text(view)
    assert shown.index("disk") < shown.index("cpu")


def test_what_was_read_last_stays_while_the_source_is_lost() -> None:
    view = View("here", reading(figures(), 1.0))
    view.on_loss("here: Connection refused")
    assert "LOST, trying again: here: Connection refused" in text(view)
    assert "disk" in text(view)
    view.on_key("r")
    view.on_reading(reading(figures({"load_bytes": 90 * MIB}, {"failed": 5}), 9.0))
    shown = text(view)
    assert "LOST" not in shown
    assert "since reset" in shown
    (load, _, evicted, _) = next(line.split()[-4:] for line in shown.splitlines() if line.startswith(" cpu"))
    assert (load, evicted) == ("-", "-"), "no rate spans the gap"
    view.on_reading(reading(figures({"load_bytes": 92 * MIB}), 10.0))
    (load, _, evicted, _) = next(line.split()[-4:] for line in text(view).splitlines() if line.startswith(" cpu"))
    assert (load, evicted) == ("2", "0")


def test_ages_and_what_was_written_to_devices() -> None:
    ages = [0, 59.4, 60, 5400, 86400 * 3, 86400 * 300]
    rows = [figures({"coldest_seconds": age, "written_bytes": 0}, {"written_bytes": 9 * MIB}) for age in ages]
    shown = []
    for stats in rows:
        view = View("here", reading(stats))
        shown.append(text(view, 140))
    found = [line.split()[-1] for each in shown for line in each.splitlines() if "3M/4M" in line]
    assert found == ["0s", "59.4s", "1m", "1.5h", "3d", "300d"]
    assert "written below the CPU tier 0B today, 9M since the start" in shown[0]


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("interval", ["0", "0.01"])
def test_once_prints_json_of_a_socket(path: str, interval: str) -> None:
    with ServedStack(parts_of(stack_file(PLAIN, 16, stats_socket=path), Engine(PLAIN, 8))):
        result = top(path, "--once", "--json", "--interval", interval)
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert (document["command"], document["version"], document["source"]) == ("top", 1, path)
    (cpu,) = document["tiers"]
    assert (cpu["tier"], cpu["state"], cpu["capacity_bytes"], cpu["errors"]) == ("cpu", "closed", 16 * 4096, 0)
    assert (document["backlog_blocks"], document["written_today_bytes"]) == (0, 0)


def test_once_prints_the_tables_of_a_page() -> None:
    with metrics_server(figures, port=0) as port:
        result = top(f"http://127.0.0.1:{port}/metrics", "--once", "--interval", "0")
    assert result.exit_code == 0, result.output
    assert "75" not in result.stdout.split("hits")[0]
    for word in ("cpu", "disk", "3M/4M", "40%", "20%", "backlog 7 blocks"):
        assert word in result.stdout


def test_a_socket_that_is_none_is_one_line(path: str) -> None:
    assert refused(path) == f"error: {path}: No such file or directory"
    Path(path).write_text("a file")
    assert refused(path) == f"error: {path}: Connection refused"
    assert "too long" in refused("/" + "x" * 200)


@pytest.mark.parametrize("answer", [b"", b"<html>", b"[]", b'{"stats": 3}', b"\xff\xfe", b'{"stats": {"tiers": {}}}'])
def test_a_socket_of_something_else_is_one_line(path: str, answer: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()

        def serve() -> None:
            with server.accept()[0] as peer:
                peer.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        assert refused(path) == f"error: {path}: it says something else than a stats socket of kvtier"
        thread.join()


def test_a_socket_that_says_nothing_is_not_waited_for(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "TIMEOUT_SECONDS", 0.5)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen(0)
        assert refused(path) == f"error: {path}: timed out"
        assert "accepts no connection" in refused(path)


@contextmanager
def web_server(status: int, answer: bytes) -> Iterator[str]:
    """The URL of a server with one answer to everything."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *arguments: object) -> None:
            """Nothing on the output of the test."""

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/metrics"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("status", "answer", "reason"),
    [
        (404, b"", "the server answers 404"),
        (200, b"<html><body>Hello, {world</body></html>\n", "it is no page of metrics"),
        (200, b"up 1\n", "there are no metrics of kvtier on this page"),
        (200, b"", "there are no metrics of kvtier on this page"),
        (200, bytes(2000), "it has more than 0 MiB"),
    ],
)
def test_a_page_that_is_none_is_one_line(
    status: int, answer: bytes, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "BYTES_MAX", 1000)
    with web_server(status, answer) as url:
        assert refused(url) == f"error: {url}: {reason}"
    assert refused(url) == f"error: {url}: Connection refused"


def test_addresses_that_cannot_be_are_one_line() -> None:
    assert "is not the URL of a page of metrics" in refused("ftp://host/x")
    assert "is not the URL of a page of metrics" in refused("http:///x")
    for address, reason in (
        ("user:secret@host", "is refused"),
        ("[::1", "is no URL"),
        ("user:secret@[::1", "is no URL"),
    ):
        line = refused(f"http://{address}/metrics")
        assert reason in line
        assert "secret" not in line


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [(["--json"], "goes with --once"), (["--interval", "0"], "goes with --once"), ([], "use --once")],
)
def test_options_that_do_not_go_together_are_one_line(path: str, arguments: list[str], reason: str) -> None:
    with ServedStack(parts_of(stack_file(PLAIN, 16, stats_socket=path), Engine(PLAIN, 8))):
        result = top(path, *arguments)
    assert result.exit_code == 2
    assert reason in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_page_that_is_broken_in_a_sample_of_kvtier_is_no_page() -> None:
    broken: list[Callable[[], object]] = [
        lambda: source.from_page('kvtier_used_bytes{tier="cpu} 3\n'),
        lambda: source.from_page('kvtier_used_bytes{tier="cpu"} many\n'),
    ]
    for parse in broken:
        with pytest.raises((ValueError, KeyError, IndexError, ResourceError)):
            parse()


async def test_a_reading_is_cancelled_also_in_the_moment_that_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the live screen would go on after its key `q`."""
    ended = asyncio.get_running_loop().create_future()
    monkeypatch.setattr(source, "_read_socket", lambda path: reading(figures()))
    monkeypatch.setattr(source.asyncio, "wrap_future", lambda call: ended)
    task = asyncio.create_task(source.read("a socket"))
    await asyncio.sleep(0)
    ended.set_result(reading(figures()))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_a_page_without_the_library_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client.parser", None)
    with web_server(200, b"up 1\n") as url:
        assert refused(url) == "error: a page of metrics needs `pip install 'kvtier[metrics]'`"

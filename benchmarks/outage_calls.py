"""What an engine's calls cost while the server below it is frozen, slow or gone, beside a healthy one in the same run.

    python -m benchmarks.outage_calls [--rounds N] [--seconds S] [--json FILE] [--quick]

A synchronous engine over a CPU tier of few rows and a Valkey server of its own looks blocks up, loads them, compares
every byte and stores what it computed. The server holds about half of them, so that the engine loads and stores in
every state: to submit a store is twice the work of a load, and with a server that fails nearly all are stores. In each
round every state of the server lasts so many seconds, healthy first; it ends healthy again, which says how far two
figures of the same thing are apart. The figures are the microseconds that 99 of 100 calls did not exceed; time spent
waiting for a busy processor is left out. A ratio is that to the healthy state, and should be at most 1.5: once of all
calls of all rounds, once the median of those of a round.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path

import click

from benchmarks.options import JSON_FILE
from benchmarks.outage import flush
from benchmarks.report import Report, median, percentile, table
from faults.driven import Engine, engine_over
from faults.machine.tcp_proxy import ProxyFaults, StreamFaults, TcpProxy
from kvtier.cli.temporary_folders import temporary_folder
from kvtier_remote import ValkeyBackend, ValkeyOptions
from kvtier_remote.valkey.embedded import EmbeddedServer, embedded_server

CALLS = ("lookup", "step", "load submit", "store submit")
HEALTHY = "healthy"
LIMIT = 1.5
SECONDS = {"request_timeout_seconds": 0.3, "job_timeout_seconds": 1.0}
QUICK_SECONDS = {"request_timeout_seconds": 10.0, "job_timeout_seconds": 12.0}
"""Connecting gets the time of a request, and a machine that is busy with tests needs more than 0.3 s at times."""
LOAD_SECONDS = 1.0
RECOVER_SECONDS = 60.0
SLOW = ProxyFaults(to_client=StreamFaults(delay_seconds=0.03, bytes_per_second=4 << 20))
MAXMEMORY = {"maxmemory": "16mb", "maxmemory-policy": "allkeys-lru"}
State = Callable[[], AbstractContextManager[None]]
Calls = dict[str, list[float]]
"""What calls cost, in seconds, by name."""


def states_of(server: EmbeddedServer, proxy: TcpProxy) -> dict[str, State]:
    """What the server is in turn; each state is over at the end of its block."""

    @contextmanager
    def healthy() -> Iterator[None]:
        yield

    @contextmanager
    def frozen() -> Iterator[None]:
        os.kill(server.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(server.pid, signal.SIGCONT)

    @contextmanager
    def gone() -> Iterator[None]:
        server.kill()
        try:
            yield
        finally:
            server.start()

    slow = partial(proxy.during, SLOW)
    return {HEALTHY: healthy, "frozen": frozen, "slow": slow, "gone": gone, "healthy again": healthy}


def calls_of(engine: Engine, seconds: float) -> Calls:
    """What calls cost from now on."""
    engine.felt.seconds.clear()
    engine.run(seconds=seconds)
    return {call: list(engine.felt.seconds.get(call, ())) for call in CALLS}


def recovered(engine: Engine, server: EmbeddedServer) -> None:
    """Empty the server, and serve until blocks are stored and loaded again; then store all of them."""
    flush(server)
    loaded, stored = engine.lower.loaded, engine.lower.stored

    def well() -> bool:
        lower = engine.lower
        return lower.loaded > loaded and lower.stored > stored and lower.breaker == "closed"

    if engine.run_until(well, RECOVER_SECONDS) is None:
        raise AssertionError(f"{RECOVER_SECONDS:g} s after a fault it did not work: {engine.lower}")
    engine.fill()


def rounds_of(count: int, seconds: float, times: dict[str, float], report: Report) -> dict[str, Calls]:
    """Add the figures of so many rounds to the report, a row for each state. Returns all calls by state."""
    every: dict[str, Calls] = {}
    with (
        temporary_folder("kvtier-outage-") as folder,
        embedded_server(Path(folder), MAXMEMORY) as server,
        TcpProxy(("127.0.0.1", server.port)) as proxy,
    ):
        hints = {"miss_hint_seconds": 0.2, "hit_hint_seconds": 2.0, "connections": 2}
        given = {"type": "valkey", "servers": [proxy.address], "tls": False} | times | hints
        tier = ValkeyBackend(ValkeyOptions.model_validate(given))
        engine = engine_over(tier, seed=count, load_seconds=LOAD_SECONDS)
        with engine:
            engine.fill()
            for number in range(count):
                for name, state in states_of(server, proxy).items():
                    with state():
                        found = calls_of(engine, seconds)
                    for call, cost in found.items():
                        every.setdefault(name, {}).setdefault(call, []).extend(cost)
                    report.results.append({"round": number, "server": name} | _row(found))
                    recovered(engine, server)
        if engine.wrong:
            raise AssertionError(f"wrong bytes: {engine.wrong[:2]}")
    report.verified = True
    return every


def _row(found: Calls) -> dict[str, float | None]:
    figures: dict[str, float | None] = {}
    for call, cost in found.items():
        figures |= {f"{call}_us": p99_us(cost), f"{call}_calls": len(cost)}
    return figures


def p99_us(cost: Sequence[float]) -> float | None:
    """Microseconds that 99 of 100 calls did not exceed; None if there were none."""
    return percentile(cost, 99) * 1e6 if cost else None


def ratio(cost: float | None, healthy: float | None) -> float | None:
    """None where one of them was not measured."""
    return None if cost is None or healthy is None else cost / healthy


def round_ratios(report: Report, state: str, call: str) -> list[float]:
    """What a call cost in a state over what it cost with a healthy server, in each round that has both."""
    of = {(row["round"], row["server"]): row[f"{call}_us"] for row in report.results}
    rounds = sorted({number for number, _ in of})
    found = [ratio(of[number, state], of[number, HEALTHY]) for number in rounds]
    return [one for one in found if one is not None]


@click.command()
@click.option("--rounds", default=5, show_default=True)
@click.option("--seconds", default=4.0, show_default=True, help="How long each state lasts.")
@click.option("--quick", is_flag=True, help="One round of half a second each.")
@JSON_FILE
def main(rounds: int, seconds: float, quick: bool, json_file: Path | None) -> None:
    """Measure, and print medians over the rounds."""
    times = SECONDS
    if quick:
        rounds, seconds, times = 1, 0.5, QUICK_SECONDS
    report = Report("outage_calls", {"rounds": rounds, "seconds": seconds})
    report.head()
    every = rounds_of(rounds, seconds, times, report)
    cells = []
    for state, calls in every.items():
        for call, cost in calls.items():
            of_all = ratio(p99_us(cost), p99_us(every[HEALTHY][call]))
            in_rounds = round_ratios(report, state, call)
            middle = median(in_rounds) if in_rounds else None
            kept = None if of_all is None else "yes" if of_all <= LIMIT else "NO"
            cells.append([f"{state}: {call}", len(cost), p99_us(cost), of_all, middle, kept])
    columns = ("server: call", "calls", "p99 us", "of healthy", "median of rounds", f"at most {LIMIT}")
    table("an engine's calls while the server fails", columns, cells)
    report.end(json_file)


if __name__ == "__main__":
    main()

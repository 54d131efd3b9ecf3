"""What an engine's calls cost while the server below it is frozen, slow or gone, beside a healthy one in the same run.

    python -m benchmarks.outage_calls [--rounds N] [--seconds S] [--json FILE] [--quick]

A synchronous engine over a CPU tier of few rows and a Valkey server of its own looks blocks up, loads them, compares
every byte and stores what it computed. In each round every state of the server lasts so many seconds, healthy first.
The figures are the microseconds that 99 of 100 calls did not exceed; time spent waiting for a busy processor is left
out. A ratio is that of two states of one round, and their median should be at most 1.5.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import click

from benchmarks.options import JSON_FILE
from benchmarks.outage import flush
from benchmarks.report import Report, median, table
from faults.driven import Engine, engine_over
from kvtier.temporary_folders import temporary_folder
from kvtier.testing import ProxyFaults, StreamFaults, TcpProxy
from kvtier_remote import ValkeyBackend, ValkeyOptions
from kvtier_remote.valkey.embedded import EmbeddedServer, embedded_server

CALLS = ("lookup", "step", "submit")
LIMIT = 1.5
REQUEST_SECONDS, JOB_SECONDS = 0.3, 1.0
RECOVER_SECONDS = 60.0
SLOW = ProxyFaults(to_client=StreamFaults(delay_seconds=0.03, bytes_per_second=4 << 20))
MAXMEMORY = {"maxmemory": "64mb", "maxmemory-policy": "allkeys-lru"}
State = Callable[[], AbstractContextManager[None]]


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

    return {"healthy": healthy, "frozen": frozen, "slow": lambda: proxy.during(SLOW), "gone": gone}


def p99_of(engine: Engine, seconds: float) -> dict[str, int]:
    """What calls cost from now on, by name, in microseconds."""
    engine.felt.seconds.clear()
    engine.run(seconds=seconds)
    return {call: engine.felt.p99_us(call) for call in CALLS}


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


def rounds_of(count: int, seconds: float, report: Report) -> None:
    """Add the figures of so many rounds to the report, a row for each state."""
    with (
        temporary_folder("kvtier-outage-") as folder,
        embedded_server(Path(folder), MAXMEMORY) as server,
        TcpProxy(("127.0.0.1", server.port)) as proxy,
    ):
        times = {"request_timeout_seconds": REQUEST_SECONDS, "job_timeout_seconds": JOB_SECONDS, "connections": 2}
        hints = {"miss_hint_seconds": 0.2, "hit_hint_seconds": 2.0}
        given = {"type": "valkey", "servers": [proxy.address], "tls": False} | times | hints
        tier = ValkeyBackend(ValkeyOptions.model_validate(given))
        engine = engine_over(tier, seed=count, load_seconds=JOB_SECONDS)
        with engine:
            engine.fill()
            for number in range(count):
                for name, state in states_of(server, proxy).items():
                    with state():
                        found = p99_of(engine, seconds)
                    calls = {f"{call}_calls": len(engine.felt.seconds[call]) for call in CALLS}
                    report.results.append({"round": number, "server": name, **found, **calls})
                    recovered(engine, server)
        if engine.wrong:
            raise AssertionError(f"wrong bytes: {engine.wrong[:2]}")
    report.verified = True


def ratios_of(report: Report, state: str, call: str) -> list[float]:
    """What a call cost in a state over what it cost with a healthy server, in each round."""
    of = {(row["round"], row["server"]): float(str(row[call])) for row in report.results}
    rounds = sorted({str(row["round"]) for row in report.results}, key=int)
    return [of[int(number), state] / of[int(number), "healthy"] for number in rounds]


@click.command()
@click.option("--rounds", default=5, show_default=True)
@click.option("--seconds", default=4.0, show_default=True, help="How long each state lasts.")
@click.option("--quick", is_flag=True, help="One round of half a second each.")
@JSON_FILE
def main(rounds: int, seconds: float, quick: bool, json_file: Path | None) -> None:
    """Measure, and print medians over the rounds."""
    if quick:
        rounds, seconds = 1, 0.5
    report = Report("outage_calls", {"rounds": rounds, "seconds": seconds})
    report.head()
    rounds_of(rounds, seconds, report)
    cells = []
    for state in dict.fromkeys(str(row["server"]) for row in report.results):
        for call in CALLS:
            mine = [float(str(row[call])) for row in report.results if row["server"] == state]
            calls = sum(int(str(row[f"{call}_calls"])) for row in report.results if row["server"] == state)
            ratio = median(ratios_of(report, state, call))
            cells.append([f"{state}: {call}", calls, median(mine), max(mine), ratio, "yes" if ratio <= LIMIT else "NO"])
    columns = ("server: call", "calls", "p99 us, median", "worst round", "of healthy, median", f"at most {LIMIT}")
    table("an engine's calls while the server fails", columns, cells)
    report.end(json_file)


if __name__ == "__main__":
    main()

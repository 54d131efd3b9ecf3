"""What a policy, the recorder and being watched add to an engine's step: `python -m benchmarks.step [--pairs N]`.

The engine is that of `benchmarks.stack`, with 32 running requests, over a `TierStack` whose loop its thread turns, as
the thread of a stack process does for its engines. Several of them are open at once: over `lru`, over
`reuse` in both tiers, over `lru` with the recorder on, watched, and with a span for each job. They take the same steps
in turns, a few at a time; who comes first changes. A turn's figure is the time of the engine's thread in calls of the
stack, added up over its steps, so arrivals and ends of requests count; CPU time, and on the clock, in which other
threads of the process may have the interpreter. The ratios are medians over pairs of turns.

A watched engine writes its lines for operators to a file, and during its turns another process reads its metrics over
HTTP and its stats socket ten times a second, where a Prometheus reads every 5 to 60 s. The spans are those of
OpenTelemetry's SDK: sampled all, kept in memory by the processor that its users have, which hands them on in batches.
"""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from select import select

import click

from benchmarks.options import JSON_FILE, QUICK
from benchmarks.report import Report, median, paired_ratio, table
from benchmarks.stack import Engine, Spent, engine_over
from kvtier.cli.temporary_folders import temporary_folder
from kvtier.metrics.exporter import metrics_server

BASE, REUSE, RECORDER, WATCHED, SPANS = CASES = ("lru", "reuse", "recorder", "watched", "spans")
PAGE_BYTES = 4096
US = 1e6
READS_PER_SECOND = 10
READER = """
import socket, sys, time, urllib.request
url, path, pause = sys.argv[1], sys.argv[2], float(sys.argv[3])
while True:
    with urllib.request.urlopen(url) as page:
        assert b"kvtier_hit_blocks_total" in page.read()
    with socket.socket(socket.AF_UNIX) as peer:
        peer.connect(path)
        while peer.recv(1 << 16):
            pass
    print("read", flush=True)
    time.sleep(pause)
"""


@dataclass
class Case:
    """An engine, what its turns cost, and who reads its figures during them."""

    engine: Engine
    reader: subprocess.Popen[bytes] | None = None
    turns: list[Spent] = field(default_factory=list)

    def turn(self, steps: int, sleep_seconds: float) -> Spent:
        """What the stack's calls cost in so many steps."""
        self.engine.spent = Spent()
        with self._read():
            for _ in range(steps):
                self.engine.step()
                time.sleep(sleep_seconds)
        return self.engine.spent

    @contextmanager
    def _read(self) -> Iterator[None]:
        if self.reader is None:
            yield
            return
        self.reader.send_signal(signal.SIGCONT)
        try:
            yield
        finally:
            self.reader.send_signal(signal.SIGSTOP)


@click.command()
@click.option("--pairs", default=21, show_default=True, help="Turns of each engine that are measured.")
@click.option("--steps", default=200, show_default=True, help="Steps in a turn.")
@click.option("--warm", default=600, show_default=True, help="Steps of each before the first.")
@click.option("--sleep-ms", default=1.0, show_default=True, help="How long a step of the engine takes without us.")
@click.option("--case", "chosen", multiple=True, type=click.Choice(CASES[1:]), help="Only these, beside lru.")
@click.option("--folder", default=None, help="Where the roots are made; a temporary folder by default.")
@QUICK
@JSON_FILE
def main(chosen: tuple[str, ...], folder: str | None, quick: bool, json_file: Path | None, **sizes: float) -> None:
    """Measure and print."""
    report = Report("step", dict(sizes))
    report.head()
    if quick:
        sizes = {"pairs": 3, "steps": 20, "warm": 20, "sleep_ms": 0.1}
    names = (BASE, *(chosen or CASES[1:]))
    with temporary_folder("kvtier-step-", folder) as scratch, ExitStack() as stack:
        cases = {name: stack.enter_context(_case(Path(scratch) / name, name)) for name in names}
        steps, sleep_seconds = int(sizes["steps"]), sizes["sleep_ms"] / 1000
        for case in cases.values():
            case.turn(int(sizes["warm"]), sleep_seconds)
        for number in range(int(sizes["pairs"])):
            first = number % len(names)
            for name in names[first:] + names[:first]:
                cases[name].turns.append(cases[name].turn(steps, sleep_seconds))
        report.results = [_figures(name, cases) for name in names]
    report.verified = True
    columns = ("what", "step_us", "median_step_us", "ratio", "ratio_of_medians", "ratio_on_the_clock", "blocks_loaded")
    table("CPU time of a step, microseconds", columns, ([row[name] for name in columns] for row in report.results))
    report.end(json_file)


@contextmanager
def _case(folder: Path, name: str) -> Iterator[Case]:
    folder.mkdir()
    root, policy = folder / "root", REUSE if name == REUSE else "lru"
    if name == WATCHED:
        with _watched(folder, root) as case:
            yield case
        return
    with _provider() if name == SPANS else nullcontext({}) as changes:
        traces = folder / "traces" if name == RECORDER else None
        with engine_over(root, PAGE_BYTES, policy, traces, **changes) as engine:
            yield Case(engine)


@contextmanager
def _watched(folder: Path, root: Path) -> Iterator[Case]:
    """An engine whose lines for operators go to a file and whose figures another process reads, once it goes on."""
    log, path = logging.getLogger("benchmark.operator"), str(folder / "s")
    log.setLevel(logging.INFO)
    log.addHandler(handler := logging.FileHandler(folder / "log"))
    try:
        with (
            engine_over(root, PAGE_BYTES, operator_log=log.name, stats_socket=path) as engine,
            metrics_server(engine.stack.stack.stats, 0) as port,
        ):
            command = [
                sys.executable,
                "-c",
                READER,
                f"http://127.0.0.1:{port}/metrics",
                path,
                f"{1 / READS_PER_SECOND}",
            ]
            with subprocess.Popen(command, stdout=subprocess.PIPE) as reader:
                try:
                    assert reader.stdout is not None
                    while not select([reader.stdout], [], [], 0)[0]:
                        engine.stack.wait(0.01)
                    assert reader.stdout.readline() == b"read\n", "the figures cannot be read"
                    reader.send_signal(signal.SIGSTOP)
                    yield Case(engine, reader)
                    assert reader.poll() is None, "the figures could not be read any more"
                finally:
                    reader.kill()
        assert "event=closed" in (folder / "log").read_text()
    finally:
        log.removeHandler(handler)
        handler.close()


@contextmanager
def _provider() -> Iterator[dict[str, object]]:
    """A tracer whose spans are kept in memory, in batches as usual."""
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    provider, exporter = TracerProvider(), InMemorySpanExporter()
    provider.add_span_processor(BatchSpanProcessor(exporter))
    yield {"tracer": provider.get_tracer("kvtier")}
    provider.shutdown()
    assert exporter.get_finished_spans()


def _figures(name: str, cases: dict[str, Case]) -> dict[str, object]:
    own, base = cases[name].turns, cases[BASE].turns
    means, base_means = ([sum(one.steps_cpu) / len(one.steps_cpu) for one in each] for each in (own, base))
    middles, base_middles = ([median(one.steps_cpu) for one in each] for each in (own, base))
    clock, base_clock = ([median(one.steps) for one in each] for each in (own, base))
    return {
        "what": name,
        "step_us": median(means) * US,
        "median_step_us": median(middles) * US,
        "ratio": paired_ratio(means, base_means),
        "ratio_of_medians": paired_ratio(middles, base_middles),
        "ratio_on_the_clock": paired_ratio(clock, base_clock),
        "blocks_loaded": cases[name].engine.loaded,
    }


if __name__ == "__main__":
    main()

"""Load or compute, in a real vLLM: time to first token where a disk is slower than the engine computes, and hits where
it is not.

    python -m benchmarks.load_or_compute [--prefill SPEED] [--prompts N] [--json FILE]

Three engines answer the same prompts in turns: one without kvtier (it computes everything), one whose stack has
`prefill_tokens_per_second`, one whose stack has not. Both stacks have every prompt on disk and little of it in rows.

1. The disk gives `--disk` MiB/s. Beside computing, what do requests wait?
2. The disk is as fast as it is, and the model computes `--slow` tokens/s. Is every block on disk a hit?

The disk is a loop device with an ext4, throttled by cgroup v1 (blkio); where that cannot be had, loads that wait for as
long as their bytes would take. The first tokens of the three engines are compared.
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import click

from benchmarks.options import JSON_FILE, VLLM_PYTHON
from benchmarks.peer import Peer
from benchmarks.report import Report, median, paired_ratio, table
from faults.machine.loops import MIB, Disk, ext4, throttled, without_throttle
from faults.machine.undo import Machine

BLOCK = 128
LENGTH = 700
WHOLE = LENGTH // BLOCK * BLOCK
SETTLED = 9
"""Requests that are not counted: until then a stack learns how fast its disk is."""
CASES = ("computed", "on", "off")
MODULE = "benchmarks.load_or_compute_engine"
Answers = dict[str, list[dict[str, Any]]]


class Place:
    """Where the roots are, and how their disks are slowed down."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        missing = without_throttle()
        self.how = "cgroup v1 blkio.throttle on a loop device" if missing is None else f"loads that wait ({missing})"
        self.roots = {case: folder / case for case in CASES[1:]}
        self._disks: list[Disk] = []
        if missing is None:
            self._machine = stack.enter_context(Machine())
            for case in CASES[1:]:
                disk = stack.enter_context(ext4(self._machine, folder / f"disk-{case}", 2600))
                self._disks.append(disk)
                self.roots[case] = disk.mount / "root"

    @contextmanager
    def slow(self, engines: dict[str, Peer], mib: float) -> Iterator[None]:
        """The disks give so many MiB a second."""
        value = int(mib * MIB)
        with ExitStack() as stack:
            for disk in self._disks:
                stack.enter_context(throttled(self._machine, disk, "bps", value))
            if not self._disks:
                for case in CASES[1:]:
                    engines[case].ask("disk", bytes_per_second=value)
            yield
            for case in CASES[1:]:
                engines[case].ask("disk", bytes_per_second=0)


def prompts(count: int, seed: int) -> list[list[int]]:
    """Prompts of LENGTH tokens without common prefixes."""
    rng = random.Random(seed)
    return [[rng.randrange(3, 500) for _ in range(LENGTH)] for _ in range(count)]


def in_turns(engines: dict[str, Peer], asked: Sequence[list[int]]) -> Answers:
    """The answers of each engine to each prompt; who comes first changes. Raises SystemExit for another token."""
    found: Answers = {case: [] for case in engines}
    order = list(engines)
    for number, prompt in enumerate(asked):
        turn = number % len(order)
        for case in order[turn:] + order[:turn]:
            found[case].append(engines[case].ask("ask", prompt=prompt))
        if len({answers[-1]["token"] for answers in found.values()}) > 1:
            raise SystemExit(f"prompt {number}: the first tokens differ")
    return found


def figures(what: str, found: Answers) -> list[dict[str, object]]:
    """A row for each engine: from the tenth request on, the seconds, beside computing, and the hits."""
    computed, computed_cpu = _settled(found["computed"])
    rows: list[dict[str, object]] = []
    for case, answers in found.items():
        seconds, cpu = _settled(answers)
        cached = [answer["cached"] for answer in answers]
        rows.append({
            "what": what, "case": case, "requests": len(seconds),
            "median_ms": 1000 * median(seconds),
            "ratio": paired_ratio(seconds, computed),
            "ratio_of_sums": sum(seconds) / sum(computed),
            "cpu_ratio": paired_ratio(cpu, computed_cpu),
            "first_requests_ms": [round(1000 * answer["seconds"], 1) for answer in answers[:SETTLED]],
            "cached_percent": 100 * sum(cached) / (WHOLE * len(cached)),
        })  # fmt: skip
    return rows


def _settled(answers: list[dict[str, Any]]) -> tuple[list[float], list[float]]:
    """Seconds, and those of processors, from the tenth answer on."""
    later = answers[SETTLED:]
    return [answer["seconds"] for answer in later], [answer["cpu_seconds"] for answer in later]


@click.command()
@click.option(
    "--prefill",
    type=click.Choice(("given", "measured")),
    default="given",
    show_default=True,
    help="Whether the stack that chooses is told how fast the engine computes.",
)
@click.option("--prompts", "count", default=24, show_default=True, help="Prompts of 700 tokens.")
@click.option("--disk", default=20.0, show_default=True, help="MiB a second of the slow disk.")
@click.option("--slow", default=1500.0, show_default=True, help="Tokens a second of the slow model.")
@click.option("--folder", type=click.Path(exists=True, path_type=Path), help="Where the disks lie.")
@VLLM_PYTHON
@JSON_FILE
def main(
    prefill: str, count: int, disk: float, slow: float, folder: Path | None, vllm_python: str | None,
    json_file: Path | None,
) -> None:  # fmt: skip
    """Measure and print."""
    report = Report("load_or_compute", {"prefill": prefill, "prompts": count, "disk": disk, "slow": slow})
    with ExitStack() as stack:
        own = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=folder)))
        place = Place(stack, own)
        report.notes.append(f"slow disk: {place.how}")
        python = vllm_python or sys.executable
        with Peer(python, MODULE) as maker:
            maker.ask("make", model=str(own / "model"))
        peers = {case: stack.enter_context(Peer(python, MODULE)) for case in (*CASES, "slow")}
        report.head()
        Measure(report, place, peers, own / "model", prefill).run(prompts(count, 7), disk, slow)
    report.verified = True
    columns = ("what", "case", "median_ms", "ratio", "ratio_of_sums", "cpu_ratio", "cached_percent")
    table("time to first token, from the tenth request on", columns,
          ([row[name] for name in columns] for row in report.results))  # fmt: skip
    report.end(json_file)


class Measure:
    """The three engines over one run."""

    def __init__(self, report: Report, place: Place, peers: dict[str, Peer], model: Path, prefill: str) -> None:
        self._report = report
        self._place = place
        self._peers = peers
        self._model = str(model)
        self._prefill = prefill

    def run(self, asked: Sequence[list[int]], disk: float, slow: float) -> None:
        """Both parts."""
        engines = {case: self._peers[case] for case in CASES}
        engines["computed"].ask("start", model=self._model, stack=None)
        speed = self._speed(prompts(8, 1))
        self._report.notes.append(f"computes {speed:.0f} tokens/s")
        self._start("off", 0.0)
        self._start("on", self._told(speed))
        in_turns({case: engines[case] for case in CASES[1:]}, asked)
        with self._place.slow(engines, disk):
            self._report.results += figures(f"disk of {disk:g} MiB/s", in_turns(engines, asked))
        engines["on"].ask("end")
        self._start("slow", self._told(slow), "on")
        engines["on"] = self._peers["slow"]
        for peer in engines.values():
            peer.ask("prefill", tokens_per_second=slow)
        self._report.results += figures(f"model of {slow:g} tokens/s", in_turns(engines, asked))

    def _told(self, speed: float) -> float | str:
        """What the stack file says of the engine's speed."""
        return speed if self._prefill == "given" else self._prefill

    def _speed(self, asked: Sequence[list[int]]) -> float:
        """Tokens a second of the engine that computes, of the fastest prompt: a busy machine makes others slower."""
        seconds = [self._peers["computed"].ask("ask", prompt=prompt)["seconds"] for prompt in asked]
        return LENGTH / min(seconds)

    def _start(self, case: str, speed: float | str, root: str = "") -> None:
        """An engine over its root, or another's; with a speed it chooses."""
        tiers = [
            {"type": "cpu", "cpu_bytes_to_use": "96MiB"},
            {"type": "fs", "roots": [str(self._place.roots[root or case])], "capacity": "2GiB"},
        ]
        stack: dict[str, object] = {"namespace": "benchmark", "tiers": tiers}
        if speed:
            stack["prefill_tokens_per_second"] = speed
        self._peers[case].ask("start", model=self._model, stack=stack)


if __name__ == "__main__":
    main()

"""A server below the disk that fails in the middle of a replay, beside the same replay undisturbed.

    python -m benchmarks.outage [--trace FILE] [--requests N] [--freeze-seconds S] [--json FILE] [--quick]

The stack is that of `configs/valkey.yaml` with an embedded server, so that a block that was used twice stays in CPU
memory longer than others. It stores what the GPU is about to evict: with as many GPU blocks as the longest request has,
nearly nothing that is used again within 500 blocks has left the GPU, and a CPU tier that repeats what the GPU holds is
hardly hit. An undisturbed replay must hit every tier.

In the middle of the replay the server is killed, started again, emptied, killed and started again at once, and frozen.
Every loaded byte is compared. The requests of the freeze come at equal intervals, also in the undisturbed replay, so
that the server runs again before the replay ends; the time between them is not counted. A disturbed replay should take
at most 1.3 times the undisturbed time, plus one job deadline for each time that a breaker of the tier opened.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import torch

from benchmarks.options import JSON_FILE
from benchmarks.report import ABSENT, Report, table
from kvtier.cli.temporary_folders import temporary_folder
from kvtier.config import StackConfig
from kvtier.stack import TierStack
from kvtier.tools.replay.report import tier_json
from kvtier.tools.replay.run import Replay
from kvtier.tools.replay.setup import ReplayOptions, make_stack
from kvtier.types.geometry import KVLayout
from kvtier_remote.valkey.embedded import EmbeddedServer, embedded_server, settings_for

STACK = """
tiers:
  - type: gpu
  - {{type: cpu, cpu_bytes_to_use: 1GiB, policy: arc}}
  - {{type: fs, roots: [{root}], capacity: 1GiB}}
  - {{type: valkey, servers: ['{server}'], tls: false}}
"""
JOB_SECONDS = 5.0
"""The tier's default `job_timeout_seconds`."""
SLOWER = 1.3
SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.8)
"""After which share of the requests each of the faults comes; the last ends the freeze."""


class Arrivals:
    """Requests that come at equal intervals between two shares of a replay, and as fast as it goes otherwise."""

    def __init__(self, requests: int, seconds: float) -> None:
        self._first, self._last = (int(share * requests) for share in SHARES[-2:])
        self._interval_seconds = seconds / (self._last - self._first)
        self._begun = 0.0
        self._served = 0
        self.idle_seconds = 0.0

    def request_served(self) -> None:
        """Called after each request, in the loop of the replay: waits until the next one comes."""
        self._served += 1
        if self._served == self._first:
            self._begun = time.monotonic()
        if self._first < self._served <= self._last:
            comes = self._begun + (self._served - self._first) * self._interval_seconds
            wait = max(0.0, comes - time.monotonic())
            time.sleep(wait)  # nothing is in flight: after each request the replay drains
            self.idle_seconds += wait


class Outage:
    """What happens to the server, by the share of the requests that were served."""

    def __init__(self, server: EmbeddedServer, requests: int) -> None:
        self._server = server
        self._frozen = False
        self._begun = time.monotonic()
        events = [self._kill, server.start, self._empty, self._restart, self._freeze, self.thaw]
        self._events = [(int(share * requests), event) for share, event in zip(SHARES, events, strict=True)]
        self._served = 0
        self.log: list[str] = []

    def request_served(self) -> None:
        """Called after each request, in the loop of the replay."""
        self._served += 1
        if self._events and self._served >= self._events[0][0]:
            event = self._events.pop(0)[1]
            event()
            name = event.__name__.strip("_")
            self.log.append(f"{name} after {self._served} requests, {time.monotonic() - self._begun:.1f} s")

    def thaw(self) -> None:
        """Let the server run again, if it is frozen."""
        if self._frozen:
            os.kill(self._server.pid, signal.SIGCONT)
            self._frozen = False

    def _freeze(self) -> None:
        os.kill(self._server.pid, signal.SIGSTOP)
        self._frozen = True

    def _kill(self) -> None:
        self._server.kill()

    def _empty(self) -> None:
        flush(self._server)

    def _restart(self) -> None:
        self._server.kill()
        self._server.start()


def flush(server: EmbeddedServer) -> None:
    """Remove everything that the server holds."""
    import valkey

    client = valkey.Valkey(port=server.port)
    client.flushall()
    client.close()


@contextmanager
def setting(given: dict[str, Any]) -> Iterator[tuple[ReplayOptions, EmbeddedServer]]:
    """A replay's options over a new disk and a new server."""
    sizes = {
        "gpu_blocks": given["gpu_blocks"],
        "cpu_blocks": given["cpu_blocks"],
        "fs_blocks": given["fs_blocks"],
        "block_bytes": given["block_kib"] << 10,
    }
    settings = settings_for(given["server_blocks"], given["block_kib"] << 10)
    with temporary_folder("kvtier-outage-", given["folder"]) as folder:
        place = Path(folder) / "server"
        place.mkdir()
        with embedded_server(place, settings) as server:
            stack = Path(folder) / "stack.yaml"
            stack.write_text(STACK.format(root=Path(folder) / "fs", server=server.address))
            source = {"trace": given["trace"]} if given["trace"] else {"workload": "chat"}
            yield ReplayOptions(stack, requests=given["requests"], store_mode="lazy", **source, **sizes), server


def replayed(options: ReplayOptions, freeze_seconds: float, disturb: Callable[[], None]) -> dict[str, Any]:
    """The figures of one replay; `disturb` is called after each request. Raises AssertionError for a wrong byte."""
    arrivals = Arrivals(options.requests or 0, freeze_seconds)
    stacks: list[TierStack] = []

    def kept(config: StackConfig, layout: KVLayout, caches: Sequence[torch.Tensor]) -> TierStack:
        stacks.append(make_stack(config, layout, caches))
        return stacks[0]

    opened = [0]

    def count() -> None:
        assert stacks[0]._assembled is not None
        lower = stacks[0]._assembled.plane.control.lowers[-1]
        breakers = [lower.load_breaker, lower.store_breaker, lower.index.lookup_breaker]
        opened[0] = sum(breaker.opened for breaker in breakers)
        arrivals.request_served()
        disturb()

    report = asyncio.run(Replay(options, kept).run(count))
    if not report.ok:
        raise AssertionError(f"wrong bytes: {report.wrong}")
    return {
        "seconds": report.seconds - arrivals.idle_seconds,
        "breaker_opened": opened[0],
        "verified": report.counts.verified,
        "mismatched": report.counts.mismatched,
        "hit_tokens": dict(report.counts.hit_tokens),
        "tiers": {name: tier_json(tier) for name, tier in report.tiers.items()},
    }


@click.command()
@click.option("--trace", type=click.Path(path_type=Path), default="../shared/traces/conversation.jsonl")
@click.option("--requests", default=2000, show_default=True)
@click.option("--gpu-blocks", default=241, show_default=True, help="The longest request of the trace fits just so.")
@click.option("--cpu-blocks", default=500, show_default=True)
@click.option("--fs-blocks", default=2000, show_default=True)
@click.option("--server-blocks", default=8000, show_default=True)
@click.option("--block-kib", default=64, show_default=True)
@click.option("--freeze-seconds", default=60.0, show_default=True)
@click.option("--folder", default=None, help="Where the disk tier is made; a temporary folder by default.")
@click.option("--quick", is_flag=True, help="A toy size, on a generated workload.")
@JSON_FILE
def main(quick: bool, json_file: Path | None, **given: Any) -> None:
    """Replay undisturbed, and with a server that fails."""
    if quick:
        small = {"trace": None, "requests": 60, "block_kib": 4, "freeze_seconds": 0.5}
        given |= small | {"gpu_blocks": None, "cpu_blocks": 300, "fs_blocks": 400, "server_blocks": 2000}
    report = Report("outage", {name: str(value) for name, value in given.items()})
    report.head()
    if given["trace"] and not given["trace"].is_file():
        report.notes.append(f"trace: {ABSENT} ({given['trace']})")
        report.end(json_file)
        return
    with setting(given) as (options, _):
        calm = replayed(options, given["freeze_seconds"], lambda: None)
    with setting(given) as (options, server):
        outage = Outage(server, given["requests"])
        try:
            disturbed = replayed(options, given["freeze_seconds"], outage.request_served)
        finally:
            outage.thaw()
    if not quick:
        untouched = [tier for tier in ("gpu", "cpu", "fs", "valkey") if not calm["hit_tokens"].get(tier)]
        if untouched:
            raise AssertionError(f"tiers without a hit: {untouched}")
    allowed = SLOWER * calm["seconds"] + JOB_SECONDS * disturbed["breaker_opened"]
    report.results += [{"what": "undisturbed", **calm}, {"what": "disturbed", "allowed_seconds": allowed, **disturbed}]
    report.notes += outage.log
    report.verified = True
    columns = ("replay", "seconds", "at most", "breaker opened", "verified", "mismatched", "hit tokens by tier")
    cells = [
        [row.get(name) for name in ("what", "seconds", "allowed_seconds", "breaker_opened", "verified", "mismatched")]
        + [", ".join(f"{tier} {tokens}" for tier, tokens in row["hit_tokens"].items())]
        for row in report.results
    ]
    table("a server that fails", columns, cells)
    report.end(json_file)


if __name__ == "__main__":
    main()

"""Block hits of replicas at one shared stack, beside those of a stack for each: `python -m benchmarks.shared_hits`.

Decisions are those of the control plane of a running stack in virtual time, as `kvtier simulate` runs it: requests of
the trace come one after another, each at the replica that the routing names, which has GPU blocks of its own. Either
all replicas use one stack, or each has one of an equal part of the same rows and disk slots. Hits are blocks of prompts
in the longest prefix that the stack has, the GPU's left out. `round robin` takes the replicas in turn, `prefix` hashes
the first blocks of a prompt.

Then a `kvtier serve` with a session for each of four engines serves the first requests, with bytes that are stored,
loaded and compared, beside a simulation of the same stack and requests: once with room for every block, once with too
few rows and slots. Policies that follow requests have the time of the trace in a simulation and the clock at a
service, so they are not compared.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import click
import xxhash

from benchmarks.options import JSON_FILE
from benchmarks.report import ABSENT, Report, table
from benchmarks.served import served
from kvtier.cli.temporary_folders import temporary_folder
from kvtier.config import StackConfig, parse_stack, stack_parts
from kvtier.service.pool import DOCUMENT_SECONDS
from kvtier.tools.replay.content import Pages, WrongPage
from kvtier.tools.replay.engine import EngineBlocks, EngineCache
from kvtier.tools.replay.run import gpu_pool_blocks, serve_options
from kvtier.tools.replay.serve import DRAIN_SECONDS, ActiveRequest, ReplayLoop, ServedStack, ServeOptions
from kvtier.tools.replay.service_stack import ServiceStack
from kvtier.tools.replay.setup import ReplayOptions, make_layout, make_namespace, make_source
from kvtier.tools.whatif.service import read_calibration
from kvtier.tools.whatif.simulate import make_stack
from kvtier.tools.whatif.stack import VirtualLoop
from kvtier.tools.whatif.variants import apply
from kvtier.traces.requests import Request
from kvtier.types.geometry import Geometry, KVLayout, stack_alignment
from kvtier.types.keys import RequestId

SHARES = (0.02, 0.05, 0.10, 0.20, 0.50)
"""Rows of all stacks together, of the distinct blocks of the trace."""
REPORTED_ONLY = 0.02
"""The share of rows without an aim."""
DISK_TIMES = 4
"""Slots on disk for each row, in stacks with a disk."""
POLICIES = ("lru", "arc", "reuse")
SERVED_POLICIES = ("lru", "arc")
SERVED_SHARES = (2.0, 0.2)
"""Rows of a service, of the blocks of its requests: enough for all, and too few."""
SERVED_ENGINES = 4
SERVED_PAGE_BYTES = 4096
PREFIX_BLOCKS = 2
"""Blocks that prefix routing hashes: the first one is that of all prompts of the trace."""
Route = Callable[[int, Request], int]
"""The replica of a request, by its number and itself; modulo the number of replicas."""


def _in_turn(number: int, request: Request) -> int:
    return number


def _by_prefix(number: int, request: Request) -> int:
    return xxhash.xxh3_64_intdigest(request.ids[:PREFIX_BLOCKS].tobytes(), seed=1)


ROUTES: dict[str, Route] = {"round robin": _in_turn, "prefix": _by_prefix}
AIMS = {"round robin": 1.8, "prefix": 0.98}
AIM_REPLICAS = 4


class Work:
    """The requests of a trace and the layout of their blocks; how many distinct ones there are."""

    def __init__(self, options: ReplayOptions) -> None:
        self.options = options
        self.source = make_source(options)
        self.requests = list(self.source.requests())
        self.layout: KVLayout = make_layout(options, self.source.block_tokens, None)
        self.gpu_blocks = gpu_pool_blocks(options, self.source)
        self.distinct = len({block for request in self.requests for block in _names(request)})

    def stack(self, policy: str, rows: int, slots: int, root: str = "/nowhere") -> tuple[StackConfig, Geometry]:
        """A stack of so many rows, and of slots on a disk unless there are none."""
        tiers = [f"{{type: cpu, cpu_bytes_to_use: 1GiB, policy: {policy}}}"]
        changes = {"cpu.blocks": str(rows)}
        if slots:
            tiers.append(f"{{type: fs, roots: ['{root}'], capacity: 1GiB, min_free_bytes: 0, policy: {policy}}}")
            changes["fs.blocks"] = str(slots)
        config = parse_stack("tiers:\n" + "".join(f"  - {tier}\n" for tier in tiers))
        alignments = [tier.BLOCK_SIZE_ALIGNMENT for tier in stack_parts(config, self.layout).tiers]
        geometry = Geometry(self.layout, stack_alignment(alignments))
        return apply(config, changes, geometry), geometry


def _names(request: Request) -> Sequence[object]:
    """Names of the whole blocks of a prompt: an id of the trace is that of a prefix, of a workload that of a place."""
    ids = request.ids[: request.prompt_blocks].tolist()
    return [(request.root, block) for block in ids]


class ReplicaLoop(ReplayLoop):
    """The serving loop of one of several engines at a stack: ids of its requests are no other's."""

    def __init__(self, number: int, engine: EngineBlocks, stack: ServedStack, options: ServeOptions) -> None:
        super().__init__(engine, stack, options)
        self._number = number

    def _begin(self, request: Request) -> ActiveRequest:
        work = super()._begin(request)
        work.request_id = RequestId(f"{self._number}:{work.request_id}")
        return work

    async def serve(self, request: Request) -> None:
        """Serve a request, and wait until the stack knows of its uses and nothing is on its way down."""
        await super().serve(request)
        await self._stack.drain(DRAIN_SECONDS, 0)


class NoContent:
    """Blocks of a simulation hold nothing."""

    def write(self, pages: Pages) -> None:
        """Nothing to write."""

    def check(self, pages: Pages) -> list[WrongPage]:
        """Nothing to compare."""
        return []


@dataclass(frozen=True, slots=True)
class Fleet:
    """So many replicas with one routing, over rows and slots of all of them together."""

    replicas: int
    routing: str
    policy: str
    rows: int
    slots: int


def simulated_hits(work: Work, fleet: Fleet, stacks: int) -> int:
    """Block hits of a fleet over one stack, or over as many as it has replicas."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(_simulate(work, fleet, stacks))


async def _simulate(work: Work, fleet: Fleet, stacks: int) -> int:
    virtual = asyncio.get_running_loop()
    assert isinstance(virtual, VirtualLoop)
    config, geometry = work.stack(fleet.policy, fleet.rows // stacks, fleet.slots // stacks)
    planes = [make_stack(config, geometry, read_calibration(None), virtual) for _ in range(stacks)]
    options = serve_options(config, work.options, geometry)
    loops = [
        ReplicaLoop(number, EngineBlocks(work.layout, work.gpu_blocks, [NoContent()]), planes[number % stacks], options)
        for number in range(fleet.replicas)
    ]
    hits = await _serve(work, loops, ROUTES[fleet.routing])
    for plane in planes:
        plane.plane.check_integrity()
    await virtual.idle()
    return hits


async def _serve(work: Work, loops: Sequence[ReplicaLoop], route: Route) -> int:
    """Serve all requests in their order, each at its replica. Returns the block hits of all."""
    for number, request in enumerate(work.requests):
        await loops[route(number, request) % len(loops)].serve(request)
    return sum(loop.counts.block_hits for loop in loops)


def compare(work: Work, fleet: Fleet, share: float) -> dict[str, Any]:
    """A row: hits of a fleet at one stack, and of a stack for each replica."""
    shared, separate = simulated_hits(work, fleet, 1), simulated_hits(work, fleet, fleet.replicas)
    references = sum(request.prompt_blocks for request in work.requests)
    disk = "with a disk" if fleet.slots else "rows alone"
    aim = AIMS[fleet.routing] if fleet.replicas == AIM_REPLICAS and share > REPORTED_ONLY else None
    return {
        "what": f"{fleet.replicas} replicas, {fleet.routing}, {disk}, {fleet.policy}, rows for {share:.0%}",
        "fleet": f"{fleet.replicas} replicas, {fleet.routing}, {disk}, {fleet.policy}",
        **{name: getattr(fleet, name) for name in Fleet.__slots__},
        "share": share,
        "block_references": references,
        "shared_hits": shared,
        "separate_hits": separate,
        "ratio": shared / separate if separate else None,
        "aim": aim,
    }


# -- a service ---------------------------------------------------------------------------------------------------


class SettledStack(ServiceStack):
    """A service's stack that waits, as a simulation does, until nothing is on its way: by figures of after the call."""

    async def drain(self, timeout_seconds: float, backlog: int) -> bool:
        await asyncio.sleep(2 * DOCUMENT_SECONDS)
        return await super().drain(timeout_seconds, backlog)


def check_service(work: Work, policy: str, rows: int, slots: int) -> dict[str, Any]:
    """A row: hits of engines at a `kvtier serve`, beside those of a simulation of it."""
    fleet = Fleet(SERVED_ENGINES, "round robin", policy, rows, slots)
    simulated = simulated_hits(work, fleet, 1)
    with temporary_folder("kvtier-shared-hits-") as folder:
        config, geometry = work.stack(policy, rows, slots, f"{folder}/root")
        with served(config.model_dump_json(exclude_unset=True), Path(folder)) as service:
            loops = asyncio.run(_serve_at(work, service.path, config, geometry))
    counts = [loop.counts for loop in loops]
    if any(each.mismatched for each in counts):
        raise AssertionError(f"wrong bytes: {[each.wrong for each in counts]}")
    hits = sum(each.block_hits for each in counts)
    return {
        "what": f"served, {policy}, {rows:,} rows, {slots:,} slots, {work.distinct:,} blocks",
        "policy": policy,
        "rows": rows,
        "slots": slots,
        "requests": len(work.requests),
        "block_references": sum(each.block_references for each in counts),
        "hits_of_engines": [each.block_hits for each in counts],
        "served_hits": hits,
        "simulated_hits": simulated,
        "ratio": hits / simulated if simulated else None,
        "blocks_verified": sum(each.verified for each in counts),
        "dropped": sum(each.dropped for each in counts),
        "load_failed": sum(each.load_failed for each in counts),
    }


async def _serve_at(work: Work, path: str, config: StackConfig, geometry: Geometry) -> Sequence[ReplicaLoop]:
    options = serve_options(config, work.options, geometry)
    async with AsyncExitStack() as opened:
        loops = []
        for number in range(SERVED_ENGINES):
            engine = EngineCache(work.layout, work.gpu_blocks, "cpu")
            stack = SettledStack(path, make_namespace(work.layout), engine.tensors)
            loops.append(ReplicaLoop(number, engine, await opened.enter_async_context(stack), options))
        await _serve(work, loops, ROUTES["round robin"])
        return loops


# -- both --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Course:
    """What is tried: the source of requests, how many of them, and the grid without the first rows, which are
    `skipped`. `served` requests are for a service."""

    source: dict[str, Any]
    replicas: Sequence[int]
    requests: int
    served: int
    skipped: int = 0
    shares: Sequence[float] = SHARES
    policies: Sequence[str] = POLICIES
    served_policies: Sequence[str] = SERVED_POLICIES
    served_shares: Sequence[float] = SERVED_SHARES


def check_services(course: Course, report: Report, json_file: Path | None) -> None:
    """A service for each policy and number of rows."""
    work = Work(ReplayOptions(requests=course.served, block_bytes=SERVED_PAGE_BYTES, **course.source))
    for policy, share in product(course.served_policies, course.served_shares):
        rows = max(2 * work.source.longest_blocks, int(share * work.distinct))
        report.results.append(check_service(work, policy, rows, 2 * rows))
        report.write(json_file)
    columns = ("what", "served_hits", "simulated_hits", "ratio", "blocks_verified", "dropped")
    table("a service beside its simulation", columns, [[row[name] for name in columns] for row in report.results])


def compare_all(course: Course, report: Report, json_file: Path | None) -> None:
    """The grid."""
    work = Work(ReplayOptions(requests=course.requests or None, **course.source))
    found: dict[str, dict[float, Any]] = {}
    grid = [
        (replicas, *rest, policy, share)
        for replicas, *rest, policy, share in product(
            course.replicas, ROUTES, (0, DISK_TIMES), course.policies, course.shares
        )
        if replicas == AIM_REPLICAS or policy == course.policies[0]  # others are reported, with one policy
    ]
    for replicas, routing, disk, policy, share in grid[course.skipped :]:
        rows = int(share * work.distinct)
        report.results.append(row := compare(work, Fleet(replicas, routing, policy, rows, disk * rows), share))
        click.echo(f"{row['what']}: {row['ratio']}", err=True)
        found.setdefault(row["fleet"], {})[share] = row["ratio"]
        report.write(json_file)
    columns = ("hits shared / separate", *(f"{share:.0%}" for share in course.shares))
    lines = [[name, *map(ratios.get, course.shares)] for name, ratios in found.items()]
    table("rows for a share of the blocks", columns, lines)


@click.command()
@click.option("--traces", default="../shared/traces", show_default=True, help="Folder of the request traces.")
@click.option("--requests", default=0, show_default=True, help="Requests of the trace; 0 for all.")
@click.option("--replicas", default="4,8", show_default=True, help="Numbers of replicas.")
@click.option("--served-requests", default=600, show_default=True, help="Requests that a service serves; 0 for none.")
@click.option("--skip", default=0, show_default=True, help="Rows of the grid that a run before has left.")
@click.option("--quick", is_flag=True, help="A toy size: a generated workload, one share of rows, one policy.")
@JSON_FILE
def main(
    traces: str, requests: int, replicas: str, served_requests: int, skip: int, quick: bool, json_file: Path | None
) -> None:
    """Count hits of replicas that share a stack, and of replicas that do not."""
    settings = {"requests": requests, "replicas": replicas, "served_requests": served_requests, "skip": skip}
    report = Report("shared_hits", {**settings, "quick": quick, "disk_times": DISK_TIMES})
    report.head()
    trace = Path(traces) / "conversation.jsonl"
    course = Course({"trace": trace}, [int(each) for each in replicas.split(",")], requests, served_requests, skip)
    if quick:
        course = Course({"workload": "chat"}, [AIM_REPLICAS], 60, 8, 0, (0.2,), ("lru",), ("lru",), SERVED_SHARES[-1:])
    elif not trace.exists():
        report.notes.append(f"trace conversation: {ABSENT} ({trace})")
        report.end(json_file)
        return
    if course.served:
        check_services(course, report, json_file)
    compare_all(course, report, json_file)
    report.verified = True
    report.end(json_file)


if __name__ == "__main__":
    main()

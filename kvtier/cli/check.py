"""`kvtier check`: what a stack file means on this machine, for a given KV layout."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from kvtier.cli.text import count_text, size_text
from kvtier.config.layout import DEFAULT_LAYOUT, read_layout
from kvtier.config.load import build_tiers, load_stack
from kvtier.config.plan import Probed, StackPlan, TierPlan, plan_stack
from kvtier.config.problems import raise_all
from kvtier.config.schema import stack_schema
from kvtier.errors import ConfigError, KVTierError, ResourceError
from kvtier.keys import GPU
from kvtier.loadstore import LoadStore, ProbesAlignment
from kvtier.registry import discover

PROBE_TIMEOUT_SECONDS = 10.0
_NONE = "-"


@click.command(short_help="Say what a stack file means, or what is wrong with it.")
@click.argument("stack", required=False, metavar="STACK.yaml")
@click.option(
    "--layout",
    default=DEFAULT_LAYOUT,
    show_default=True,
    metavar="LAYOUT",
    help="KV cache groups separated by ';', each KIND:key=value,... with KIND full, sliding_window or mamba and the "
    "keys page (bytes on one worker) or layers, kv_heads, head_dim, dtype (MLA: layers, latent_dim, dtype); block "
    "(tokens); window. Or a YAML or JSON file of the same.",
)
@click.option("--world-size", type=click.IntRange(1, 65536), help="Workers that hold a slice of each block.")
@click.option("--factor", type=click.IntRange(1, 4096), help="GPU blocks in one offloaded block.")
@click.option("--no-probe", is_flag=True, help="Look at the file only, at no folder and no device.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
@click.option("--schema", is_flag=True, help="Print the JSON schema of stack files and end.")
def check(stack: str | None, schema: bool, as_json: bool, **asked: Any) -> None:
    """Say what STACK.yaml means: alignment, row bytes, padding, blocks, tokens, memory.

    Exits with 2 and one line for each error if the stack could not be opened.
    """
    if stack is None and not schema:
        raise click.UsageError("give a stack file, or --schema")
    try:
        if stack is None or schema:
            click.echo(json.dumps(stack_schema(), indent=2))
            return
        question = Question(**asked)
        plan = _plan(stack, question)
    except KVTierError as error:
        for line in str(error).splitlines():
            click.echo(f"error: {line}", err=True)
        raise click.exceptions.Exit(2) from None
    if as_json:
        click.echo(json.dumps(asdict(plan), indent=2))
    else:
        _show(plan, question)


@dataclass(frozen=True, slots=True)
class Question:
    """For which layout to ask, and whether to look at folders and devices."""

    layout: str
    world_size: int | None
    factor: int | None
    no_probe: bool


def _plan(stack: str, question: Question) -> StackPlan:
    backends = discover()
    config = load_stack(stack, backends)
    layout = read_layout(question.layout).layout(question.world_size, question.factor or config.block_size_factor)
    tiers = build_tiers(config, backends)
    problems: list[ConfigError] = []
    probed = Probed.floors(tiers) if question.no_probe else asyncio.run(_probe(tiers, problems))
    plan, found = plan_stack(config, tiers, layout, probed)
    # A preview names the place that is bad; what the probe said of the same tier adds nothing.
    told = {problem.path.partition(".")[0] for problem in found}
    raise_all([problem for problem in problems if problem.path not in told] + found)
    return plan


async def _probe(tiers: Sequence[LoadStore], problems: list[ConfigError]) -> Probed:
    """Each tier's alignment, asked of its device where the backend can; its class's floor where it cannot.

    With a device that does not answer, no device is looked at any further: that would not answer either.
    """
    alignments, hung = [], False
    for index, tier in enumerate(tiers):
        alignment = tier.BLOCK_SIZE_ALIGNMENT
        if isinstance(tier, ProbesAlignment):
            try:
                async with asyncio.timeout(PROBE_TIMEOUT_SECONDS):
                    alignment = max(alignment, await tier.probe_alignment())
            except TimeoutError:
                hung = True
                reason = f"does not answer within {PROBE_TIMEOUT_SECONDS:g} seconds; look at its device"
                problems.append(ConfigError(reason, f"tiers[{index}]"))
            except (ResourceError, ConfigError) as error:
                problems.append(ConfigError(" ".join(str(error).split()), f"tiers[{index}]"))
        alignments.append(alignment)
    return Probed(tuple(alignments), look=not hung)


def _show(plan: StackPlan, question: Question) -> None:
    console = Console()
    once = " with one copy for all" if plan.num_copies < plan.world_size else ""
    console.print(
        f"[bold]Layout[/bold] {escape(question.layout)}, {plan.world_size} worker(s){once}, "
        f"{plan.block_size_factor} GPU block(s) in an offloaded block",
        soft_wrap=True,
    )
    console.print(
        f"[bold]Row[/bold] {size_text(plan.row_bytes)} ({count_text(plan.row_bytes)} bytes), aligned to "
        f"{count_text(plan.alignment)}, the least common multiple of the tiers' alignments",
        soft_wrap=True,
    )
    groups = Table("group", Column("kind", no_wrap=True), title="KV cache groups", title_justify="left")
    for heading in ("tokens a block", "page, one worker", "offloaded block", "padding", "waste"):
        groups.add_column(heading, justify="right")
    for index, group in enumerate(plan.groups):
        sizes = (group.page_bytes, group.kv_bytes_per_offloaded_block, group.padding_bytes)
        waste = f"{100 * group.waste:.1f} %"
        groups.add_row(str(index), group.kind, count_text(group.tokens_per_block), *map(size_text, sizes), waste)
    console.print(groups)
    tiers = Table("", title="Tiers", title_justify="left")
    for tier in plan.tiers:
        tiers.add_column(tier.name, justify="right")
    for heading, cells in zip(_HEADINGS, zip(*map(_cells, plan.tiers), strict=True), strict=True):
        tiers.add_row(heading, *cells)
    console.print(tiers)
    for tier in plan.tiers:
        for note in tier.notes:
            console.print(f"{escape(tier.name)}: {escape(note)}", soft_wrap=True)


_HEADINGS = (
    "medium",
    "BLOCK_SIZE_ALIGNMENT",
    "capacity",
    "num_blocks",
    "tokens held",
    "index memory, at most",
    "eviction policy",
    "write policy",
    "I/O engine",
    "I/O mode",
)


def _cells(tier: TierPlan) -> tuple[str, ...]:
    of_engine = "the engine's" if tier.medium == GPU else _NONE
    return (
        tier.medium,
        count_text(tier.alignment),
        of_engine if tier.capacity_bytes is None else size_text(tier.capacity_bytes),
        of_engine if tier.num_blocks is None else count_text(tier.num_blocks),
        of_engine if tier.tokens is None else count_text(tier.tokens),
        _NONE if tier.index_bytes is None else size_text(tier.index_bytes),
        tier.policy or _NONE,
        tier.write_policy or _NONE,
        tier.io_engine or _NONE,
        tier.mode or _NONE,
    )

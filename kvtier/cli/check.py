"""`kvtier check`: what a stack file means on this machine, for a given KV layout."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import click
from rich.console import Console
from rich.markup import escape

from kvtier.cli.terminal import table
from kvtier.config.access import UserAccess
from kvtier.config.layout import DEFAULT_LAYOUT, read_layout
from kvtier.config.load import StackConfig, build_tiers, load_stack, stack_schema
from kvtier.config.plan import GroupPlan, StackPlan, TierPlan, plan_stack
from kvtier.config.problems import raise_all
from kvtier.errors import ConfigError, ResourceError, UsageError
from kvtier.options import count_text, size_text
from kvtier.tier.contract import LoadStore, ProbesAlignment
from kvtier.tier.registry import discover
from kvtier.types.keys import GPU

PROBE_TIMEOUT_SECONDS = 10.0
_NONE = "-"


@click.command(short_help="Print what a stack file means, or what is wrong with it.")
@click.argument("stack", required=False, metavar="STACK.yaml")
@click.option(
    "--layout",
    default=DEFAULT_LAYOUT,
    metavar="LAYOUT",
    help="KV cache groups separated by ';', each KIND:key=value,... with KIND full, sliding_window or mamba and the "
    "keys page (bytes on one worker) or layers, kv_heads, head_dim, dtype (MLA: layers, latent_dim, dtype); block "
    "(tokens); window. Or a YAML or JSON file of the same.",
)
@click.option("--world-size", type=click.IntRange(1, 65536), help="Workers that hold a slice of each block.")
@click.option("--factor", type=click.IntRange(1, 4096), help="GPU blocks in one offloaded block.")
@click.option(
    "--probe/--no-probe",
    default=True,
    show_default=True,
    help="Look at folders, devices and servers, or read the file only.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
@click.option("--schema", is_flag=True, help="Print the JSON schema of stack files and end.")
def check(stack: str | None, schema: bool, as_json: bool, layout: str, **options: Any) -> None:
    """Print what STACK.yaml means: alignment, row bytes, padding, blocks, tokens, memory.

    Exits with 2 and one line for each error if the stack could not be opened.
    """
    if schema:
        click.echo(json.dumps(stack_schema(), indent=2))
        return
    if stack is None:
        raise UsageError("give a stack file, or --schema")
    plan = _plan(stack, layout, **options)
    if as_json:
        click.echo(json.dumps(asdict(plan), indent=2))
    else:
        _show(plan, layout)


def _plan(stack: str, layout: str, world_size: int | None, factor: int | None, probe: bool) -> StackPlan:
    backends = discover()
    config = load_stack(stack, backends)
    kv_layout = read_layout(layout).layout(world_size, factor or config.block_size_factor)
    tiers = build_tiers(config, backends)
    alignments, problems, hung = asyncio.run(_probe(tiers)) if probe else (None, [], True)
    problems += _users(config) if probe else []
    # With a device that does not answer, a dry run would not answer either.
    plan, found = plan_stack(tiers, kv_layout, alignments, probe=not hung)
    # The dry run names the bad place. The failed probe of the same tier would repeat it.
    named = {problem.path.partition(".")[0] for problem in found}
    raise_all([problem for problem in problems if problem.path not in named] + found)
    return plan


def _users(config: StackConfig) -> list[ConfigError]:
    """The names in the file that no user or group of this host has, the first of them."""
    try:
        UserAccess(config.allow, config.group)
    except ConfigError as error:
        return [error]
    return []


async def _probe(tiers: Sequence[LoadStore]) -> tuple[list[int], list[ConfigError], bool]:
    """(alignments, problems, whether a device does not answer).

    The alignment is that of the tier's device where the backend can probe it, else the floor of its class.
    """
    alignments, problems, hung = [], [], False
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
    return alignments, problems, hung


def _show(plan: StackPlan, layout: str) -> None:
    console = Console()
    once = " with one copy for all" if plan.num_copies < plan.world_size else ""
    console.print(
        f"[bold]Layout[/bold] {escape(layout)}, {plan.world_size} worker(s){once}, "
        f"{plan.block_size_factor} GPU block(s) in an offloaded block",
        soft_wrap=True,
    )
    console.print(
        f"[bold]Row[/bold] {size_text(plan.row_bytes)} ({count_text(plan.row_bytes)} bytes), aligned to "
        f"{count_text(plan.alignment)}, the least common multiple of the tiers' alignments",
        soft_wrap=True,
    )
    groups = [_group_cells(index, group) for index, group in enumerate(plan.groups)]
    console.print(table([*groups[0]], [[*cells.values()] for cells in groups], words=(0, 1), title="KV cache groups"))
    facts = [_tier_facts(tier) for tier in plan.tiers]
    rows = [(heading, *(of_tier[heading] for of_tier in facts)) for heading in facts[0]]
    console.print(table(["", *(tier.name for tier in plan.tiers)], rows, title="Tiers"))
    for tier in plan.tiers:
        for note in tier.notes:
            console.print(f"{escape(tier.name)}: {escape(note)}", soft_wrap=True)


def _group_cells(index: int, group: GroupPlan) -> dict[str, str]:
    return {
        "group": str(index),
        "kind": group.kind,
        "tokens a block": count_text(group.tokens_per_block),
        "page, one worker": size_text(group.page_bytes),
        "offloaded block": size_text(group.kv_bytes_per_offloaded_block),
        "padding": size_text(group.padding_bytes),
        "waste": f"{100 * group.waste:.1f} %",
    }


def _tier_facts(tier: TierPlan) -> dict[str, str]:
    of_engine = "the engine's" if tier.medium == GPU else _NONE
    return {
        "medium": tier.medium,
        "BLOCK_SIZE_ALIGNMENT": count_text(tier.alignment),
        "capacity": of_engine if tier.capacity_bytes is None else size_text(tier.capacity_bytes),
        "num_blocks": of_engine if tier.num_blocks is None else count_text(tier.num_blocks),
        "tokens held": of_engine if tier.tokens is None else count_text(tier.tokens),
        "index memory, at most": _NONE if tier.index_bytes is None else size_text(tier.index_bytes),
        "eviction policy": tier.policy or _NONE,
        "write policy": tier.write_policy or _NONE,
        "I/O engine": tier.io_engine or _NONE,
        "I/O mode": tier.mode or _NONE,
    }

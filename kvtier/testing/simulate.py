"""`python -m kvtier.testing.simulate --seeds N --start K`: attack the stack in a simulated world, seed by seed.

A seed that breaks a promise is printed with what was broken and the command that replays it. The exit status is 1 if
any did. See docs/simulator.md.
"""

from __future__ import annotations

import json
import sys
import time

import click

from kvtier.registry import discover
from kvtier.testing.world.scenario import Outcome, run_seed


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--seeds", default=200, show_default=True, type=click.IntRange(min=1), help="How many seeds to run.")
@click.option("--start", default=0, show_default=True, type=click.IntRange(min=0), help="The first seed.")
@click.option("--seed", "single", type=click.IntRange(min=0), help="Run this one seed.")
@click.option("--trace", "with_trace", is_flag=True, help="Print all that happened, with virtual times.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object for each broken seed, and one at the end.")
def simulate(seeds: int, start: int, single: int | None, with_trace: bool, as_json: bool) -> None:
    """Run seeded simulations of the whole stack over simulated disks that fail, lie and crash."""
    backend = discover().get("fs")
    chosen = range(start, start + seeds) if single is None else range(single, single + 1)
    began = time.perf_counter()
    broken = loaded = crashes = 0
    for seed in chosen:
        outcome = run_seed(seed, backend)
        loaded += outcome.loaded
        crashes += outcome.crashes
        broken += bool(outcome.violations)
        if with_trace:
            click.echo("\n".join(outcome.trace))
        if outcome.violations or single is not None:
            click.echo(_one(outcome, as_json))
    seconds = time.perf_counter() - began
    total = {
        "seeds": len(chosen),
        "first_seed": chosen[0],
        "broken": broken,
        "blocks_loaded": loaded,
        "crashes": crashes,
        "seconds": round(seconds, 3),
    }
    if as_json:
        click.echo(json.dumps(total))
    else:
        per_seed = 1000 * seconds / len(chosen)
        click.echo(
            f"{len(chosen)} seeds from {chosen[0]}: {broken} broken; {loaded} blocks loaded and compared, "
            f"{crashes} crashes; {seconds:.1f} s, {per_seed:.1f} ms a seed"
        )
    sys.exit(1 if broken else 0)


def _one(outcome: Outcome, as_json: bool) -> str:
    """A seed's outcome, for people or for scripts."""
    replay = f"python -m kvtier.testing.simulate --seed {outcome.seed} --trace"
    if as_json:
        fields = {"seed": outcome.seed, "violations": outcome.violations, "trace": outcome.digest, "replay": replay}
        return json.dumps(fields)
    lines = [f"seed {outcome.seed}: trace {outcome.digest}, {len(outcome.violations)} violation(s)"]
    lines += [f"  {violation}" for violation in outcome.violations]
    return "\n".join([*lines, f"  replay: {replay}"])


if __name__ == "__main__":
    simulate()

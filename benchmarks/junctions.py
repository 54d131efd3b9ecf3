"""What the ends of shared prefixes add to the bytes that vLLM stores, and what they bring, over a trace.

    python -m benchmarks.junctions ../shared/traces/conversation.jsonl

A computation: nothing is copied. The rule is that of `KVTierConnector`, which blocks of a prompt are stored is decided
by vLLM's own managers of windows and states, and how far a request continues by the lookup of its connector, with its
defaults. Each request finds what all before it stored, and nothing in the GPU's cache. A block has the tokens of the
trace's, 512, because it shows no shorter prefix; a block of every group has the same bytes, as in vLLM.
"""

from __future__ import annotations

from pathlib import Path

import click

from benchmarks.report import table


@click.command()
@click.argument("trace", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--limit", type=int, default=None, help="Only the first requests.")
def main(trace: Path, limit: int | None) -> None:
    """Print, for each layout, blocks stored and tokens restored without and with the rule."""
    from benchmarks.junction_replay import LAYOUTS, replay  # here, because it imports vLLM

    rows = []
    for layout in LAYOUTS:
        before, after = (replay(layout, trace, rule, limit) for rule in (False, True))
        figures = f"{before.blocks:,}", f"{after.blocks:,}", f"{after.blocks / before.blocks:.3f}"
        rows.append([layout, *figures, f"{before.restored_tokens:,}", f"{after.restored_tokens:,}"])
    columns = ["model", "blocks stored", "with the rule", "ratio", "tokens restored", "with the rule"]
    table(f"shared prefixes over {trace.name}", columns, rows)


if __name__ == "__main__":
    main()

"""From results to a table in Markdown: `python -m faults.report RESULTS.json ...`, on standard output.

Several files may hold results of one fault: their counts are added up, and every seed is named.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import click

from .attack import add_notes

COLUMNS = ("fault", "how", "iterations", "wrong bytes", "hangs", "leaks", "over bound", "first seeds", "command")
COUNTS = ("iterations", "wrong_bytes", "hangs", "leaks", "over_bound")


@click.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
def main(files: tuple[Path, ...]) -> None:
    """Print one row a fault, in the order in which they were run."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for file in files:
        for result in json.loads(file.read_text())["attacks"]:
            rows.setdefault(result["fault"], []).append(result)
    print("| " + " | ".join(COLUMNS) + " |")
    print("|---|---|" + "---:|" * len(COUNTS) + "---|---|")
    for name, results in rows.items():
        figures = [f"{sum(result[count] for result in results):,}" for count in COUNTS]
        seeds = ", ".join(str(result["seed"]) for result in results)
        how = results[0]["how"].replace("|", "\\|")
        print(f"| {name} | {how} | {' | '.join(figures)} | {seeds} | `--only '{name}'` |")
    print()
    for name, results in rows.items():
        notes = Counter[str]()
        for result in results:
            add_notes(notes, result["notes"])
        if notes:
            print(f"- **{name}**: " + ", ".join(f"{note} {count:,}" for note, count in sorted(notes.items())) + ".")


if __name__ == "__main__":
    main()

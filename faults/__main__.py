"""`python -m faults [--long]`: attack the store in every way there is; exit 1 if a promise broke."""

from __future__ import annotations

import json
import platform
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from .attack import Attack, Tally
from .suite import Result, all_attacks, run


@click.command()
@click.option("--long", "is_long", is_flag=True, help="The long counts; hours. What cannot run here is a failure.")
@click.option("--only", multiple=True, metavar="NAME", help="Only this attack; may be given several times.")
@click.option("--count", type=int, help="Iterations of each attack instead of its own counts.")
@click.option("--seed", type=int, help="Seed of the first shard of each attack; printed in the table.")
@click.option("--jobs", type=int, default=1, show_default=True, help="Attacks, and shards of attacks, side by side.")
@click.option("--folder", type=click.Path(exists=True, path_type=Path), help="Where attacks keep their files.")
@click.option("--json", "answer", type=click.Path(path_type=Path), help="Write the results to this file as well.")
@click.option("--list", "listing", is_flag=True, help="Name the attacks and their counts, and run none.")
def main(is_long: bool, only: tuple[str, ...], count: int | None, seed: int | None, jobs: int, folder: Path | None,
         answer: Path | None, listing: bool) -> None:  # fmt: skip
    """Attack the store in every way there is and print what came of it."""
    known = all_attacks()
    unknown = [name for name in only if name not in known]
    if unknown:
        raise click.BadParameter(f"no attack is named {', '.join(unknown)}", param_hint="--only")
    chosen = [attack for name, attack in known.items() if not only or name in only]
    if listing:
        _list(chosen)
        return
    first = random.SystemRandom().randrange(2**31) if seed is None else seed
    results = _run_all(chosen, is_long, count, first, jobs, folder)
    _show(results)
    if answer is not None:
        answer.write_text(json.dumps(_record(results, is_long), indent=1) + "\n")
    if any(not result.tally.clean and (is_long or result.missing is None) for result in results):
        raise SystemExit(1)


def _run_all(chosen: list[Attack], is_long: bool, count: int | None, first: int, jobs: int,
             folder: Path | None) -> list[Result]:  # fmt: skip
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar, ThreadPoolExecutor(jobs) as pool:
        task = bar.add_task("attacks", total=0)

        def shard(attack: Attack, total: int, number: int, seed: int) -> Result:
            result = run(attack, total, seed, folder, long=is_long)
            bar.advance(task)
            bar.print(
                f"{attack.name} shard {number}: {'held' if result.tally.clean else 'BROKEN'} in {result.seconds:.0f} s"
            )
            return result

        waiting = []
        for attack in chosen:
            total = count or (attack.long if is_long else attack.normal)
            shards = min(attack.shards, jobs, total) if is_long else 1
            parts = [total // shards + (number < total % shards) for number in range(shards)]
            waiting.append([pool.submit(shard, attack, part, n, first + n) for n, part in enumerate(parts)])
            bar.update(task, total=sum(len(each) for each in waiting))
        return [_joined([part.result() for part in each]) for each in waiting]


def _joined(parts: list[Result]) -> Result:
    tally = Tally()
    for part in parts:
        tally.add(part.tally)
    count = sum(part.count for part in parts)
    missing = next((part.missing for part in parts if part.missing is not None), None)
    return Result(parts[0].attack, count, parts[0].seed, tally, max(part.seconds for part in parts), missing)


def _list(chosen: list[Attack]) -> None:
    table = Table("fault", "how", "normal", "long", "cannot run here because")
    for attack in chosen:
        table.add_row(attack.name, attack.how, f"{attack.normal:,}", f"{attack.long:,}", attack.missing() or "")
    Console().print(table)


def _show(results: list[Result]) -> None:
    table = Table("fault", "iterations", "wrong bytes", "hangs", "leaks", "over bound", "seconds", "seed", "")
    for result in results:
        tally = result.tally
        verdict = "cannot run" if result.missing is not None else "held" if tally.clean else "BROKEN"
        figures = (tally.iterations, tally.wrong_bytes, tally.hangs, tally.leaks, tally.over_bound)
        table.add_row(result.attack.name, *(f"{figure:,}" for figure in figures), f"{result.seconds:.0f}",
                      str(result.seed), verdict)  # fmt: skip
    console = Console() if Console().is_terminal else Console(width=160)
    console.print(table)
    for result in results:
        notes = ", ".join(f"{name} {value:,}" for name, value in sorted(result.tally.notes.items()))
        if notes:
            console.print(f"{result.attack.name}: {notes}", highlight=False)
        for problem in result.tally.problems:
            console.print(f"{result.attack.name}: {problem}", style="red", highlight=False, markup=False)


def _record(results: list[Result], is_long: bool) -> dict[str, Any]:
    return {
        "long": is_long,
        "machine": {"kernel": platform.release(), "processor": platform.machine(), "python": platform.python_version()},
        "attacks": [
            {"fault": result.attack.name, "how": result.attack.how, "count": result.count, "seed": result.seed,
             "seconds": round(result.seconds, 1), "missing": result.missing, **result.tally.as_json()}
            for result in results
        ],
    }  # fmt: skip


if __name__ == "__main__":
    main()

"""The bar that long commands show on a terminal."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class Advance(Protocol):
    """Moves a bar on by some steps, and changes its title if one is given."""

    def __call__(self, steps: int = 1, title: str | None = None) -> None: ...


@contextmanager
def progress(title: str, total: int | None = None) -> Iterator[Advance]:
    """A bar on stderr, if that is a terminal. Without a total it says how many steps were done, and the time."""
    console = Console(stderr=True)
    known = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    unknown = (TextColumn("{task.completed:,.0f}"), TimeElapsedColumn())
    columns = (TextColumn("{task.description}"), *(unknown if total is None else known))
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task(title, total=total)
        yield lambda steps=1, title=None: bar.update(task, advance=steps, description=title)

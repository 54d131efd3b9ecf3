"""Tables for a terminal, and the bar that long commands show on it."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

BAR_CELLS = 10
_PARTS = " ▏▎▍▌▋▊▉█"


def table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], words: Collection[int] = (0,), title: str | None = None
) -> Table:
    """A table of plain text. The columns numbered in `words` are flush left, the others hold figures, flush right."""
    shown = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for index, column in enumerate(columns):
        shown.add_column(column, justify="left" if index in words else "right", no_wrap=index in words)
    for row in rows:
        shown.add_row(*map(escape, row))
    return shown


def bar(share: float, cells: int = BAR_CELLS) -> str:
    """A share of the whole as a bar of at most `cells` characters, to an eighth of a character."""
    eighths = round(max(0.0, min(1.0, share)) * cells * 8)
    whole, part = divmod(eighths, 8)
    return _PARTS[8] * whole + _PARTS[part].strip()


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

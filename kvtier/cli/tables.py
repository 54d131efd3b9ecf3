"""Tables for a terminal."""

from collections.abc import Collection, Iterable, Sequence

from rich import box
from rich.markup import escape
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

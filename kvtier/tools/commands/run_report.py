"""The common part of commands that run for a while: options, sizes, the times of a trace, files for the figures, an
orderly end on a signal."""

import asyncio
import json
import os
import signal
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

import click
from rich.console import Console

from kvtier.config.layout import DEFAULT_LAYOUT
from kvtier.errors import ConfigError
from kvtier.options import parse_size
from kvtier.tools.whatif.page import check_plotly
from kvtier.tools.whatif.service import PREFILL_TOKENS_PER_SECOND
from kvtier.traces.read import PER_SECOND
from kvtier.traces.requests import RequestSource

SLOWEST_PER_SECOND, FASTEST_PER_SECOND = 1 / 60, 50.0
"""Rates of requests beyond which a trace is rather read in a wrong unit: units differ by a factor of a thousand."""
FEWEST_REQUESTS = 10
_SIZES = (("days", 86400), ("hours", 3600), ("minutes", 60))

T = TypeVar("T")
Command = TypeVar("Command", bound=Callable[..., Any])


class Figures(Protocol):
    """Findings of a run: a table, a record, and whether every byte was right."""

    @property
    def ok(self) -> bool: ...
    def show(self, console: Console) -> None: ...
    def to_json(self) -> dict[str, Any]: ...


@runtime_checkable
class HasPage(Protocol):
    """Figures that can be shown in a browser."""

    def to_html(self) -> str:
        """A page that needs no network. Raises ConfigError where the plotting library is not installed."""


def report(found: Figures, json_file: Path | None, html_file: Path | None = None) -> None:
    """Show what was found and write it to the files, if there are any. Exits with 1 if a byte was wrong."""
    found.show(Console())
    if json_file is not None:
        _write(json_file, json.dumps(found.to_json(), indent=2) + "\n", "--json")
    if html_file is not None and isinstance(found, HasPage):
        _write(html_file, found.to_html(), "--html")
    if not found.ok:
        raise click.exceptions.Exit(1)


def _write(path: Path, text: str, option: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {os.fspath(path)}: {error.strerror}", option) from None


def run_to_end(work: Coroutine[Any, Any, T]) -> T:
    """Run it. SIGTERM ends it as Ctrl-C does, with everything closed and removed: KeyboardInterrupt."""

    async def main() -> T:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        return await work

    try:
        return asyncio.run(main())
    except (asyncio.CancelledError, KeyboardInterrupt):
        raise KeyboardInterrupt("temporary storage is removed") from None


def size(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    """A size such as `64KiB`, as in stack files."""
    if value is None:
        return None
    try:
        found = parse_size(value)
    except ValueError as error:
        raise ConfigError(str(error), param.opts[0]) from None
    if found < 1:
        raise ConfigError("must be at least one byte", param.opts[0])
    return found


def _writable(ctx: click.Context, param: click.Parameter, path: Path | None) -> Path | None:
    """Refuse a bad path for the figures before the run, not after a long wait."""
    if path and (path.is_dir() or not os.access(path if path.exists() else path.absolute().parent, os.W_OK)):
        option = param.opts[0]
        raise ConfigError(f"cannot write {os.fspath(path)}: not a file in a folder that can be written", option)
    return path


def _page_file(ctx: click.Context, param: click.Parameter, path: Path | None) -> Path | None:
    """The same for a page, and refuse it before the run where it could not be drawn."""
    if path:
        check_plotly()
    return _writable(ctx, param, path)


def _output_option(name: str, text: str, check: Callable[..., Path | None] = _writable) -> Callable[[Command], Command]:
    """An option that names a file to write."""
    path = click.Path(path_type=Path)
    return click.option(f"--{name}", f"{name}_file", type=path, callback=check, metavar="FILE", help=text)


json_file_option = _output_option("json", "Write the figures here.")
html_file_option = _output_option(
    "html", "Write a page for a browser here; needs `pip install 'kvtier[plots]'`.", _page_file
)
store_mode_option = click.option("--store-mode", type=click.Choice(["eager", "lazy"]), default="eager")
backlog_option = click.option(
    "--backlog",
    type=click.IntRange(0),
    default=0,
    metavar="N",
    help="Blocks that may be queued or in flight to lower tiers when the next request begins.",
)
time_unit_option = click.option(
    "--time-unit",
    type=click.Choice(list(PER_SECOND)),
    help="Unit of the trace's times. [default: ms of `timestamp`, s of `t`]",
)
layout_option = click.option(
    "--layout", default=DEFAULT_LAYOUT, show_default="8B model", metavar="LAYOUT", help="KV layout, as for `check`."
)
prefill_option = click.option(
    "--prefill",
    "prefill_tokens_per_second",
    type=click.FloatRange(min=0, min_open=True),
    default=PREFILL_TOKENS_PER_SECOND,
    metavar="TOKENS/S",
    help="How fast the engine computes a prompt.",
)


def note_times(source: RequestSource) -> None:
    """Print on stderr over which time the requests came, if that is known, and whether that is unlikely."""
    if source.seconds is None:
        return
    click.echo(f"note: {source.name}: {source.num_requests:,} requests over {_span_text(source.seconds)}", err=True)
    if source.num_requests < FEWEST_REQUESTS or not source.seconds:
        return
    rate = source.num_requests / source.seconds
    if not SLOWEST_PER_SECOND <= rate <= FASTEST_PER_SECOND:
        reason = f"{rate:.3g} requests a second are unlikely; if its times are in another unit, give --time-unit"
        click.echo(f"warning: {source.name}: {reason}", err=True)


def _span_text(seconds: float) -> str:
    for name, size in _SIZES:
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {name}"
    return f"{seconds:.3g} s"

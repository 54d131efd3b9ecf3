"""What every command that reads a trace does about its times: an option for their unit, and a note of their span."""

import click

from kvtier.traces.read import PER_SECOND
from kvtier.traces.requests import RequestSource

SLOWEST_PER_SECOND, FASTEST_PER_SECOND = 1 / 60, 50.0
"""Rates of requests beyond which a trace is rather read in a wrong unit: units differ by a factor of a thousand."""
FEWEST_REQUESTS = 10
_SIZES = (("days", 86400), ("hours", 3600), ("minutes", 60))

time_unit_option = click.option(
    "--time-unit",
    type=click.Choice(list(PER_SECOND)),
    help="Unit of the trace's times. [default: ms of `timestamp`, s of `t`]",
)


def note_times(source: RequestSource) -> None:
    """Print on stderr over which time the requests came, if that is known, and whether that is unlikely."""
    if source.seconds is None:
        return
    click.echo(f"note: {source.name}: {source.num_requests:,} requests over {_text(source.seconds)}", err=True)
    if source.num_requests < FEWEST_REQUESTS or not source.seconds:
        return
    rate = source.num_requests / source.seconds
    if not SLOWEST_PER_SECOND <= rate <= FASTEST_PER_SECOND:
        reason = f"{rate:.3g} requests a second are unlikely; if its times are in another unit, give --time-unit"
        click.echo(f"warning: {source.name}: {reason}", err=True)


def _text(seconds: float) -> str:
    for name, size in _SIZES:
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {name}"
    return f"{seconds:.3g} s"

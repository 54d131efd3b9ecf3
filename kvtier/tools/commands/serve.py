"""`kvtier serve`: a stack in a process of its own, which several engines of a host share."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import click

from kvtier.cli.metrics_page import metrics_page
from kvtier.client.private import runtime_folder
from kvtier.config.load import parse_stack
from kvtier.config.strict_yaml import read_text
from kvtier.errors import ConfigError
from kvtier.service.queued_log import log_to_stderr
from kvtier.service.run import serve as serve_stack
from kvtier.service.supervisor import supervise
from kvtier.stack import StackStats


def _address(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[str, int] | None:
    """The host and the port of an address."""
    if value is None:
        return None
    host, _, port = value.rpartition(":")
    if not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"is [HOST:]PORT, such as 127.0.0.1:9090; got {value!r}", param.opts[0])
    return host.strip("[]") or "127.0.0.1", int(port)


@click.command(short_help="Serve a stack to the engines of this host.")
@click.argument("stack", metavar="STACK.yaml")
@click.option(
    "--socket",
    "path",
    metavar="PATH",
    help="Path of the Unix socket; one named as the file, in the stack's runtime_dir, when left out.",
)
@click.option(
    "--metrics",
    metavar="[HOST:]PORT",
    callback=_address,
    help="Serve metrics on http://HOST:PORT/metrics; HOST is 127.0.0.1 when left out.",
)
@click.option(
    "--keep-rows",
    is_flag=True,
    help="A parent process keeps the rows, and starts this one again after a crash, and at SIGHUP: for containers and "
    "hosts without systemd.",
)
def serve(stack: str, path: str | None, metrics: tuple[str, int] | None, keep_rows: bool) -> None:
    """Serve STACK.yaml at a Unix socket, until SIGTERM or Ctrl-C; what is dirty is written back then.

    Engines of this user, or of those in `allow`, share its rows, disks and servers. The log goes to stderr.
    """
    text = read_text(stack)
    place = path or str(runtime_folder(parse_stack(text).runtime_dir) / f"{Path(stack).stem}.sock")
    if keep_rows:
        page_at = [] if metrics is None else ["--metrics", "[{}]:{}".format(*metrics)]
        supervise(["serve", stack, "--socket", place, *page_at])
    log_to_stderr("%(asctime)s %(levelname)s %(message)s")

    def page(stats: Callable[[], StackStats]) -> AbstractContextManager[object]:
        return nullcontext() if metrics is None else metrics_page(stats, *metrics, "--metrics")

    serve_stack(text, place, watch=page)

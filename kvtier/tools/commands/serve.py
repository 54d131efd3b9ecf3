"""`kvtier serve`: a stack in a process of its own, which several engines of a host share."""

import logging
from pathlib import Path

import click

from kvtier.client.private import runtime_folder
from kvtier.config.load import parse_stack
from kvtier.config.strict_yaml import read_text
from kvtier.service.run import serve as serve_stack


@click.command(short_help="Serve a stack to the engines of this host.")
@click.argument("stack", metavar="STACK.yaml")
@click.option(
    "--socket",
    "path",
    metavar="PATH",
    help="Path of the Unix socket; one named as the file, in the stack's runtime_dir, when left out.",
)
def serve(stack: str, path: str | None) -> None:
    """Serve STACK.yaml at a Unix socket, until SIGTERM or Ctrl-C; what is dirty is written back then.

    Engines of this user and of one namespace share its rows, disks and servers. The log goes to stderr.
    """
    text = read_text(stack)
    place = path or str(runtime_folder(parse_stack(text).runtime_dir) / f"{Path(stack).stem}.sock")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    serve_stack(text, place)

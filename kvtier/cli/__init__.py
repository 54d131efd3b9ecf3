"""The command `kvtier`: check, ls, du, fsck, gc, and tables for all commands; opens no stack; fsck and gc write."""

import errno
import importlib
import io
import os
import sys
from contextlib import suppress
from importlib.metadata import entry_points
from typing import Any, NoReturn

import click

from kvtier.errors import IntegrityError, KVTierError

COMMANDS = ("check", "du", "fsck", "gc", "ls")
"""The commands of the core; those of other packages are entry points of the group `kvtier.commands`."""
GROUP = "kvtier.commands"
CANNOT = 2
INTERRUPTED = 130


class _Commands(click.Group):
    """A command of the core is the object of its name in the module of its name.

    Its errors are one line each and exit status 2: wrong usage, every KVTierError but a defect of kvtier itself, and
    output that cannot be written. What the encoding of the output lacks is printed as a question mark.
    """

    def main(self, *args: Any, **extra: Any) -> Any:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")
        try:
            try:
                return super().main(*args, **extra)
            finally:  # here and not when the interpreter ends, whose error would be a traceback
                if sys.stdout is not None:
                    sys.stdout.flush()
        except OSError as error:
            # What is still in the buffer would fail again at the end.
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115
            if error.errno == errno.EPIPE:  # a reader that has gone, such as `head`, needs no line
                sys.exit(1)
            with suppress(OSError):
                click.echo(f"error: {error.filename or 'the output'}: {error.strerror}", err=True)
            sys.exit(CANNOT)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*COMMANDS, *entry_points(group=GROUP).names})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in COMMANDS:
            command = getattr(importlib.import_module(f"kvtier.cli.{cmd_name}"), cmd_name)
        elif points := entry_points(group=GROUP, name=cmd_name):
            command = next(iter(points)).load()
        else:
            return None
        assert isinstance(command, click.Command)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as interrupt:
            click.echo("; ".join(("interrupted", *interrupt.args)), err=True)
            raise click.exceptions.Exit(INTERRUPTED) from None
        except click.UsageError as error:
            _fail(" ".join(error.format_message().split()))
        except IntegrityError:
            raise
        except KVTierError as error:
            _fail(str(error))


def _fail(message: str) -> NoReturn:
    """Print each line of a message as an error, and exit."""
    for line in message.splitlines():
        click.echo(f"error: {line}", err=True)
    raise click.exceptions.Exit(CANNOT) from None


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.version_option(package_name="kvtier", prog_name="kvtier")
def main() -> None:
    """A tiered storage engine for the KV cache of LLM serving."""

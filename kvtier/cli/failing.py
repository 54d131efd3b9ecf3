"""How commands fail: one line for each error, exit status 2."""

from __future__ import annotations

from typing import Any, NoReturn

import click

CANNOT = 2


def fail(message: str) -> NoReturn:
    """Each line of a message as an error, and exit status 2."""
    for line in message.splitlines():
        click.echo(f"error: {line}", err=True)
    raise click.exceptions.Exit(CANNOT) from None


class OneLineErrors(click.Command):
    """A command whose usage errors are one line each, like all its other errors."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        try:
            return super().make_context(info_name, args, parent, **extra)
        except click.UsageError as error:
            fail(" ".join(error.format_message().split()))

"""The command line. A command's code is loaded when it is run, so that looking at a disk does not load torch."""

from __future__ import annotations

import importlib

import click

COMMANDS = ("bench", "check", "du", "fsck", "gc", "ls", "replay")


class _Commands(click.Group):
    """Each command is the object of its own name in the module of its own name."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command = getattr(importlib.import_module(f"kvtier.cli.{cmd_name}"), cmd_name)
        assert isinstance(command, click.Command)
        return command


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="kvtier", prog_name="kvtier")
def main() -> None:
    """A tiered storage engine for the KV cache of LLM serving."""

"""The command line: `kvtier check` and `kvtier replay`."""

from __future__ import annotations

import importlib
import importlib.util

import click

from kvtier.cli.check import check


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="kvtier", prog_name="kvtier")
def main() -> None:
    """A tiered storage engine for the KV cache of LLM serving."""


main.add_command(check)
if importlib.util.find_spec("kvtier.cli.replay"):
    main.add_command(importlib.import_module("kvtier.cli.replay").replay)

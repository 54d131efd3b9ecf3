"""The command line: `kvtier check` and `kvtier replay`."""

from __future__ import annotations

import click

from kvtier.cli.check import check
from kvtier.cli.replay import replay


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="kvtier", prog_name="kvtier")
def main() -> None:
    """A tiered storage engine for the KV cache of LLM serving."""


main.add_command(check)
main.add_command(replay)

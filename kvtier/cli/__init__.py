"""The command line: `kvtier check` and `replay` for stacks, `fsck`, `ls`, `du` and `gc` for stores on disk."""

from __future__ import annotations

import click

from kvtier.cli.check import check
from kvtier.cli.du import du
from kvtier.cli.fsck import fsck
from kvtier.cli.gc import gc
from kvtier.cli.ls import ls
from kvtier.cli.replay import replay


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="kvtier", prog_name="kvtier")
def main() -> None:
    """A tiered storage engine for the KV cache of LLM serving."""


main.add_command(check)
main.add_command(replay)
main.add_command(fsck)
main.add_command(ls)
main.add_command(du)
main.add_command(gc)

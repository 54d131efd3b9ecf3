"""Time to first token of 1,400 tokens in a real vLLM: computed, from its own cache, from the CPU tier, from disk.

    python -m benchmarks.vllm_ttft MODEL [--prompts N] [--json]

One engine, one prompt at a time, the four cases interleaved; medians. The output's first token is compared between the
cases. `MODEL` is a folder; `python tests/vllm/support_models.py llama FOLDER` makes a small random one.
"""

from __future__ import annotations

import json
import os
import platform
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

BLOCK = 128
LENGTH = 1400
CASES = ("computed", "vLLM GPU prefix hit", "kvtier CPU hit", "kvtier disk hit")


@click.command()
@click.argument("model", type=click.Path(exists=True, path_type=Path))
@click.option("--prompts", default=20, show_default=True, help="Prompts measured in each case.")
@click.option(
    "--cpu-bytes", default="16MiB", show_default=True, help="The CPU tier; too small for all prompts together."
)
@click.option("--folder", type=click.Path(exists=True, path_type=Path), help="Where the disk tier lies.")
@click.option("--json", "as_json", is_flag=True)
def main(model: Path, prompts: int, cpu_bytes: str, folder: Path | None, as_json: bool) -> None:
    """Measure and print."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    with tempfile.TemporaryDirectory(dir=folder) as root:
        seconds = _measure(model, prompts, cpu_bytes, root)
    medians = {case: statistics.median(values) for case, values in seconds.items()}
    if as_json:
        machine = {"kernel": platform.release(), "processor": platform.processor(), "cores": os.cpu_count()}
        print(
            json.dumps({"machine": machine, "prompts": prompts, "tokens": LENGTH, "median_seconds": medians}, indent=1)
        )
        return
    table = Table("time to first token", "median ms", "share of computing")
    for case, median in medians.items():
        table.add_row(case, f"{median * 1000:.1f}", f"{median / medians[CASES[0]]:.2f}")
    Console().print(table)


def _measure(model: Path, count: int, cpu_bytes: str, root: str) -> dict[str, list[float]]:
    from vllm import LLM, SamplingParams

    stack = {
        "namespace": "benchmark",
        "tiers": [{"type": "cpu", "cpu_bytes_to_use": cpu_bytes}, {"type": "fs", "roots": [root], "capacity": "1GiB"}],
    }
    connector: dict[str, Any] = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "KVTierSpec",
            "spec_module_path": "kvtier.engines.vllm",
            "stack": stack,
        },
    }
    llm = LLM(str(model), enforce_eager=True, dtype="float32", max_model_len=4096, kv_transfer_config=connector)
    settings = SamplingParams(temperature=0, max_tokens=1)
    rng = random.Random(7)
    everything = [[rng.randrange(3, 500) for _ in range(LENGTH)] for _ in range(count + 40)]
    asked, others = everything[:count], everything[count:]

    def once(prompt: list[int]) -> tuple[float, int, int]:
        begun = time.perf_counter()
        output = llm.generate([{"prompt_token_ids": prompt}], settings, use_tqdm=False)[0]
        return time.perf_counter() - begun, output.num_cached_tokens or 0, output.outputs[0].token_ids[0]

    for prompt in others:
        once(prompt)
    seconds: dict[str, list[float]] = {case: [] for case in CASES}
    whole = LENGTH // BLOCK * BLOCK
    for prompt in asked:
        first = None
        for case, cached in zip(CASES, (0, whole, whole, whole), strict=True):
            if case != CASES[1]:
                time.sleep(0.05)  # the stores of the request before are still under way
                llm.reset_prefix_cache()
            if case == CASES[3]:
                for other in rng.sample(others, 20):  # they take the prompt's rows in the CPU tier
                    once(other)
                llm.reset_prefix_cache()
            taken, found, token = once(prompt)
            if found != cached or first not in (None, token):
                raise SystemExit(f"{case}: {found} tokens cached, not {cached}; first token {token}, not {first}")
            first = token
            seconds[case].append(taken)
    return seconds


if __name__ == "__main__":
    main()

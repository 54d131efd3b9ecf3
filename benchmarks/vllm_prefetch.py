"""The next turn of a paused session in a real vLLM: time to first token from rows, from a slow disk, after a prefetch.

    python -m benchmarks.vllm_prefetch MODEL [--prompts N] [--load-ms MS] [--json FILE]

One engine, one prompt of 1,400 tokens at a time. Each prompt is retained, and asked for again in three cases, in each
order in turn. Before each case other prompts take its rows, and vLLM's own cache is emptied. Then it is loaded (`CPU
hit`), left on disk (`disk hit`), or named by the prefetch of another, tiny request (`after a prefetch`). The disk takes
`--load-ms` more for each block, one load after another. The first tokens are compared, and the tiers' counters have to
say where the blocks came from. `MODEL` is a folder; `python tests/vllm/support_models.py llama FOLDER` makes a small
random one.
"""

from __future__ import annotations

import itertools
import os
import random
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import click

from benchmarks.options import JSON_FILE
from benchmarks.report import OURS, Report, median, paired_ratio, table, versions
from benchmarks.vllm_processes import fork_processes, slow_service

BLOCK = 128
LENGTH = 1400
WHOLE = LENGTH // BLOCK
OTHERS = 30
TAKING = 14
"""Other prompts that are asked for before each case, 140 blocks."""
SETTLED_SECONDS = 0.5
"""From the tiny request to the turn, at least, in each case."""
COUNTED_SECONDS = 20.0
TINY = [5, 6, 7]
COLUMNS = ("case", "prompts", "quartile ms", "median ms", "quartile ms", "ratio of medians", "paired ratio")
CASES = ("CPU hit", "disk hit", "after a prefetch")


class Counts(NamedTuple):
    """Blocks that were prefetched, hits on disk, and hits of all tiers: each block that vLLM loaded is one."""

    prefetched: int
    disk: int
    loaded: int


class Engine:
    """One vLLM, its scheduler in a process of its own, as in a server."""

    def __init__(self, model: Path, stack: dict[str, Any]) -> None:
        from vllm import LLM

        self._open = ExitStack()
        self._service = self._open.enter_context(slow_service(stack, "slow_loads"))
        self._loaded = 0
        fork_processes()
        connector = {"spec_name": "KVTierSpec", "spec_module_path": "kvtier.engines.vllm", "stack": stack}
        connector["service"] = self._service.path
        self._llm = LLM(
            str(model), enforce_eager=True, dtype="float32", max_model_len=4096, disable_log_stats=False,
            kv_transfer_config={
                "kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": connector
            },
        )  # fmt: skip

    def ask(self, prompt: list[int], *hints: tuple[str, dict[str, Any]]) -> tuple[float, int, int]:
        """Seconds to the first token, tokens that were cached, and the first token; hints as HTTP requests say them."""
        from vllm import SamplingParams

        said = [{"action_type": f"kvtier.{name}", "payload": payload} for name, payload in hints]
        settings = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
        settings.extra_args = {"kv_transfer_params": {"kvtier_hints": said}} if said else None
        begun = time.perf_counter()
        output = self._llm.generate([{"prompt_token_ids": prompt}], settings, use_tqdm=False)[0]
        seconds, cached = time.perf_counter() - begun, output.num_cached_tokens or 0
        self._loaded += cached // BLOCK
        return seconds, cached, output.outputs[0].token_ids[0]

    def slow_down(self, load_seconds: float) -> None:
        """From here on loads of the disk take so much longer a block."""
        self._service.tell(load_seconds)

    def reset(self) -> None:
        """Empty vLLM's own cache."""
        if not self._llm.reset_prefix_cache():
            raise SystemExit("vLLM's cache is in use")

    def counted(self) -> Counts:
        """What the tiers have counted, the loads of all that vLLM has said to be cached among it.

        vLLM takes the figures in its steps: an engine that has nothing to do is given a tiny request until they have
        come. Raises SystemExit if they do not.
        """
        deadline = time.monotonic() + COUNTED_SECONDS
        while (found := self._read()).loaded < self._loaded:
            if time.monotonic() > deadline:
                raise SystemExit(f"{found}, not {self._loaded} blocks loaded, after {COUNTED_SECONDS:g} s")
            self.ask(TINY)
        return found

    def _read(self) -> Counts:
        """vLLM's page once the engine has nothing to do."""
        from prometheus_client import REGISTRY

        core = self._llm.llm_engine.engine_core
        while core.call_utility("has_work"):
            time.sleep(0.02)
        while not core.outputs_queue.empty():
            self._llm.llm_engine.step()
        samples = [sample for metric in REGISTRY.collect() for sample in metric.samples]

        def total(name: str, *tiers: str) -> int:
            some = [one for one in samples if one.name == name]
            return sum(int(one.value) for one in some if not tiers or one.labels["tier"] in tiers)

        hits = "kvtier_hit_blocks_total"
        return Counts(total("kvtier_prefetched_blocks_total"), total(hits, "fs"), total(hits))

    def close(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()
        self._open.close()


def measure(engine: Engine, count: int, load_seconds: float) -> dict[str, list[float]]:
    """Seconds to the first token of `count` prompts a case. Raises SystemExit where a case is not what it says."""
    rng = random.Random(7)
    prompts = [[rng.randrange(3, 500) for _ in range(LENGTH)] for _ in range(count + OTHERS)]
    others = prompts[count:]
    for other in others:
        engine.ask(other)
    seconds: dict[str, list[float]] = {case: [] for case in CASES}
    orders = itertools.cycle(itertools.permutations(CASES))
    for number, (prompt, order) in enumerate(zip(prompts[:count], orders, strict=False)):
        session = {"session": f"agent {number}"}
        first = engine.ask(prompt, ("retain", {"seconds": 600.0, **session}))[2]
        for case in order:
            engine.slow_down(0.0)
            engine.reset()
            for other in rng.sample(others, TAKING):
                engine.ask(other)
            if case == "CPU hit":
                engine.ask(prompt)
            before = engine.counted()
            engine.slow_down(load_seconds)
            turn_at = time.monotonic() + SETTLED_SECONDS
            engine.ask(TINY, *([("prefetch", session)] if case == "after a prefetch" else []))
            warm = engine.counted()
            time.sleep(max(0.0, turn_at - time.monotonic()))
            engine.reset()
            taken, cached, token = engine.ask(prompt)
            after = engine.counted()
            found = after.prefetched - before.prefetched, after.disk - warm.disk, cached, token
            due = WHOLE * (case == "after a prefetch"), WHOLE * (case == "disk hit"), WHOLE * BLOCK, first
            if found != due:
                raise SystemExit(f"{case}: blocks prefetched, from disk, tokens cached, first token {found}, not {due}")
            seconds[case].append(taken)
        engine.ask(TINY, ("release", session))
    return seconds


def figures(seconds: dict[str, list[float]]) -> list[dict[str, object]]:
    """A row for each case, beside a CPU hit."""
    rows: list[dict[str, object]] = []
    for case, values in seconds.items():
        low, middle, high = statistics.quantiles(values, n=4)
        rows.append({
            "case": case, "prompts": len(values),
            "first_quartile_ms": 1000 * low, "median_ms": 1000 * middle, "third_quartile_ms": 1000 * high,
            "ratio_of_medians": middle / median(seconds[CASES[0]]),
            "paired_ratio": paired_ratio(values, seconds[CASES[0]]),
            "all_ms": [round(1000 * value, 1) for value in values],
        })  # fmt: skip
    return rows


@click.command()
@click.argument("model", type=click.Path(exists=True, path_type=Path))
@click.option("--prompts", default=60, show_default=True, help="Prompts measured in each case.")
@click.option("--load-ms", default=30.0, show_default=True, help="What the disk takes longer for each block.")
@click.option("--cpu-bytes", default="8MiB", show_default=True, help="The CPU tier: 40 to 70 blocks.")
@click.option("--folder", type=click.Path(exists=True, path_type=Path), help="Where the disk tier lies.")
@JSON_FILE
def main(
    model: Path, prompts: int, load_ms: float, cpu_bytes: str, folder: Path | None, json_file: Path | None
) -> None:
    """Measure and print."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    settings: dict[str, object] = {"prompts": prompts, "tokens": LENGTH, "load_ms": load_ms, "cpu_bytes": cpu_bytes}
    report = Report("vllm_prefetch", settings, versions=versions((*OURS, "vllm-cpu")))
    report.head()
    with tempfile.TemporaryDirectory(dir=folder) as root:
        tiers = [{"type": "cpu", "cpu_bytes_to_use": cpu_bytes}, {"type": "fs", "roots": [root], "capacity": "1GiB"}]
        engine = Engine(model, {"namespace": "benchmark", "tiers": tiers})
        try:
            seconds = measure(engine, prompts, load_ms / 1000)
        finally:
            engine.close()
    report.verified = True
    report.results = figures(seconds)
    table("the next turn", COLUMNS, [list(row.values())[: len(COLUMNS)] for row in report.results])
    report.end(json_file)


if __name__ == "__main__":
    main()

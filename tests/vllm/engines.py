"""Starting vLLM in a process of its own with a stack, asking it, and killing it; prompts with shared prefixes."""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any
from unittest.mock import patch

from support_service import peer_pid

HERE = Path(__file__).parent
BLOCK = 128
VOCABULARY = 512
SEED = 11
KINDS: dict[str, dict[str, Any]] = {"llama": {}, "gemma3": {"disable_hybrid_kv_cache_manager": False}}
START_SECONDS = 300.0
ANSWER_SECONDS = 300.0
EXIT_SECONDS = 60.0
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
}
OURS = {"kv_connector": "KVTierConnector", "kv_connector_module_path": "kvtier.engines.vllm"}
IMPORTED = ["vllm.entrypoints.llm", "vllm.v1.engine.core", "vllm.v1.worker.cpu_worker", "vllm.lora.request"]


def block_bytes(kind: str) -> int:
    """Bytes of a row, 128 tokens of 2 layers: K and V, 2 heads of 32 values of 4 bytes; or 576 values of 2 bytes."""
    return 2 * (576 * 2 if kind == "deepseek" else 2 * 2 * 32 * 4) * BLOCK


@dataclass
class Answer:
    """The tokens of a generation, their log-probabilities, how many tokens were cached, and of how many, by prompt."""

    tokens: list[list[int]]
    cached: list[int]
    seconds: float
    logprobs: list[list[float]] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)


@dataclass
class Engine:
    """A running engine. Every call has a deadline: a hang fails the test, and the process is killed."""

    process: ForkServerProcess
    questions: Connection
    log: Path

    def ask(self, seconds: float = ANSWER_SECONDS, **question: Any) -> Any:
        self.questions.send(question)
        return self.hear(seconds)

    def hear(self, seconds: float) -> Any:
        ready = wait([self.questions, self.process.sentinel], seconds)
        try:
            if self.questions in ready:
                return self.questions.recv()
        except (EOFError, ConnectionError):
            pass
        raise AssertionError(f"the engine {'died' if ready else 'hangs'}:\n{self.tail()}")

    def generate(self, prompts: list[list[int]], tokens: int = 8, **more: Any) -> Answer:
        return Answer(**self.ask(**{"do": "generate", "prompts": prompts, "tokens": tokens, **more}))

    def reset(self, *, tiers: bool = False) -> None:
        assert self.ask(do="reset", tiers=tiers)

    def metrics(self) -> dict[str, float]:
        return self.ask(do="metrics")

    def block_size(self) -> int:
        """Tokens of a GPU block, as the engine decided."""
        return self.ask(do="block_size")

    def page(self, accept: str) -> tuple[str, str]:
        """vLLM's page of metrics in the format asked for, and its content type."""
        return self.ask(do="page", accept=accept)

    def kill(self) -> None:
        """SIGKILL every process of the engine at once."""
        assert self.process.pid is not None
        os.killpg(self.process.pid, signal.SIGKILL)

    def tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-60:])


def total(told: dict[str, float], name: str, label: str = "") -> float:
    """The sum of a metric over its labels, of those alone that `label` is part of."""
    return sum(value for key, value in told.items() if key.startswith(name + "{") and label in key)


def wait_for_figure(vllm: Engine, name: str, least: int) -> float:
    """A metric summed over its labels, once it is that much. The figures of a stack process come with steps."""
    until = time.monotonic() + ANSWER_SECONDS
    while (found := total(vllm.metrics(), name)) < least:
        assert time.monotonic() < until, found
        vllm.generate([[5, 6, 7]], tokens=1)
    return found


@cache
def fork_server() -> ForkServerContext:
    """Makes processes that have imported vLLM. That takes 12 s of CPU, and an engine has three processes."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    with patch.dict(os.environ, ENVIRONMENT):
        forkserver.ensure_running()
    return context


def make_model(kind: str, folder: Path, seed: int = 0) -> Path:
    """A small model and its tokenizer in a new folder; another seed, other weights."""
    run_forked(_save_model, kind, str(folder), seed)
    return folder


def run_forked(work: Callable[..., object], *given: Any) -> None:
    """Run it in a process that has imported vLLM, to its end. Raises RuntimeError if it fails."""
    process = fork_server().Process(target=work, args=given)
    process.start()
    process.join()
    if process.exitcode:
        raise RuntimeError(f"{work.__name__} of {given[0]} ended with {process.exitcode}")


def _save_model(*given: Any) -> None:
    import support_models  # here, because it imports transformers

    support_models.save(*given)


def _serve(log: str, environment: dict[str, str], config: dict[str, Any], questions: Connection) -> None:
    os.setsid()
    gc.freeze()  # what was imported before the fork: vLLM collects garbage several times at start, each for a second
    out = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.environ.update(environment)
    if config.get("data_parallel_size", 1) > 1:
        import support_data_parallel as support  # here, because it imports vLLM
    else:
        import support_engine as support

    support.main(config, questions)


@contextmanager
def engine(
    model: Path,
    folder: Path,
    stack: dict[str, Any] | str | None = None,
    environment: dict[str, str] | None = None,
    **config: Any,
) -> Iterator[Engine]:
    """An engine on `model`; with kvtier when a stack or `connector` is given, which goes into
    kv_connector_extra_config.

    The connector is vLLM's own, unless `vllms_connector` is false. The stack is in a private process, unless
    `connector` has another driver: what was stored is on the disk alone once the engine has ended.
    """
    connector, theirs = config.pop("connector", {}), config.pop("vllms_connector", True)
    settings: dict[str, Any] = {"model": str(model), "max_model_len": 12288, "disable_log_stats": False, **config}
    if stack is not None or connector:
        settings["kv_transfer_config"] = {
            **({"kv_connector": "OffloadingConnector"} if theirs else OURS),
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "spec_name": "KVTierSpec",
                "spec_module_path": "kvtier.engines.vllm",
                **({} if stack is None else {"stack": stack}),
                **connector,
            },
        }
    log = folder / f"engine-{len(list(folder.glob('engine-*')))}.log"
    ours, theirs = fork_server().Pipe()
    given = (str(log), ENVIRONMENT | (environment or {}), settings, theirs)
    process = fork_server().Process(target=_serve, args=given)
    process.start()
    theirs.close()
    with ours:
        started = Engine(process, ours, log)
        try:
            assert started.hear(START_SECONDS) == {"ready": True}
            yield started
            if process.is_alive():
                ours.close()
                process.join(EXIT_SECONDS)
                assert not process.is_alive(), f"the engine does not end:\n{started.tail()}"
        finally:
            if process.is_alive():
                started.kill()
            process.join()
            with suppress(EOFError, OSError):  # the engine's other processes have the pipe too: until all have ended
                while ours.poll(EXIT_SECONDS):
                    ours.recv()


def stack_process(runtime: str) -> int:
    """The process that listens below this folder."""
    (path,) = Path(runtime).rglob("*.sock")
    return peer_pid(str(path))


def stack(root: Path, rows: int, kind: str = "llama", capacity: str = "256MiB", **fs: Any) -> dict[str, Any]:
    """A CPU tier of so many rows above a disk that holds everything."""
    return {
        "namespace": f"engine-lane-{kind}",
        "tiers": [
            {"type": "cpu", "cpu_bytes_to_use": rows * block_bytes(kind)},
            {"type": "fs", "roots": [str(root)], "capacity": capacity, **fs},
        ],
    }


def secondary(tier: str, rows: int, **options: Any) -> dict[str, Any]:
    """The configuration of vLLM's connector for its own CPU tier of so many rows above a disk tier of kvtier."""
    below = {"type": tier, "module_path": "kvtier.engines.vllm", "namespace": "engine-lane", "capacity": "256MiB"}
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "TieringOnCPU",
            "spec_module_path": "tiering_on_cpu",
            "cpu_bytes_to_use": rows * block_bytes("llama"),
            "secondary_tiers": [{**below, **options}],
        },
    }


def prompts(seed: int, count: int = 24, prefixes: int = 4) -> list[list[int]]:
    """Prompts of 9 to 12 blocks and a bit, each beginning with one of a few shared prefixes of 6 blocks."""
    rng = random.Random(seed)

    def words(length: int) -> list[int]:
        return [rng.randrange(3, VOCABULARY) for _ in range(length)]

    shared = [words(6 * BLOCK) for _ in range(prefixes)]
    return [shared[number % prefixes] + words(rng.randrange(3, 7) * BLOCK - 40) for number in range(count)]

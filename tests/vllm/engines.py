"""Starting vLLM in a process of its own with a stack, asking it, and killing it; prompts with shared prefixes."""

from __future__ import annotations

import json
import os
import random
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
BLOCK = 128
VOCABULARY = 512
SEED = 11
KINDS: dict[str, dict[str, Any]] = {"llama": {}, "gemma3": {"disable_hybrid_kv_cache_manager": False}}
START_SECONDS = 300.0
ANSWER_SECONDS = 300.0


def block_bytes(kind: str) -> int:
    """Bytes of a row, 128 tokens of 2 layers: K and V, 2 heads of 32 values of 4 bytes; or 576 values of 2 bytes."""
    return 2 * (576 * 2 if kind == "deepseek" else 2 * 2 * 32 * 4) * BLOCK


@dataclass
class Answer:
    """What a generation gave: the tokens and how many were cached, prompt by prompt."""

    tokens: list[list[int]]
    cached: list[int]
    seconds: float


@dataclass
class Engine:
    """A running engine. Every call has a deadline: a hang fails the test, and the process is killed."""

    process: subprocess.Popen[str]
    answers: Any
    log: Path
    said: list[Any] = field(default_factory=list)

    def ask(self, seconds: float = ANSWER_SECONDS, **question: Any) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        return self.hear(seconds)

    def hear(self, seconds: float) -> Any:
        ready, _, _ = select.select([self.answers], [], [], seconds)
        line = self.answers.readline() if ready else ""
        if not line:
            raise AssertionError(f"the engine {'hangs' if not ready else 'died'}:\n{self.tail()}")
        return json.loads(line)

    def generate(self, prompts: list[list[int]], tokens: int = 8, **more: Any) -> Answer:
        return Answer(**self.ask(do="generate", prompts=prompts, tokens=tokens, **more))

    def reset(self, *, tiers: bool = False) -> None:
        assert self.ask(do="reset", tiers=tiers)

    def metrics(self) -> dict[str, float]:
        return self.ask(do="metrics")

    def kill(self) -> None:
        """SIGKILL every process of the engine at once."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-60:])


@contextmanager
def engine(model: Path, folder: Path, stack: dict[str, Any] | str | None = None, **config: Any) -> Iterator[Engine]:
    """An engine on `model`; with kvtier when a stack is given. `connector` goes into kv_connector_extra_config."""
    connector = config.pop("connector", {})
    settings: dict[str, Any] = {"model": str(model), "max_model_len": 12288, "disable_log_stats": False, **config}
    if stack is not None:
        settings["kv_transfer_config"] = {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "spec_name": "KVTierSpec",
                "spec_module_path": "kvtier.integrations.vllm",
                "stack": stack,
                **connector,
            },
        }
    log = folder / f"engine-{len(list(folder.glob('engine-*')))}.log"
    read, write = os.pipe()
    command = [sys.executable, str(HERE / "support_engine.py"), json.dumps(settings), str(write)]
    with log.open("w") as out:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=out, stderr=out, text=True, pass_fds=(write,), start_new_session=True
        )
    os.close(write)
    with os.fdopen(read) as answers:
        started = Engine(process, answers, log)
        try:
            assert started.hear(START_SECONDS) == {"ready": True}
            yield started
            if process.poll() is None:
                assert process.stdin is not None
                process.stdin.close()
                process.wait(60)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            if process.stdin is not None:
                process.stdin.close()


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
    below = {"type": tier, "module_path": "kvtier.integrations.vllm", "namespace": "engine-lane", "capacity": "256MiB"}
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

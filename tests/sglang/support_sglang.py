"""A real SGLang server on this machine's CPU, in processes of its own, spoken to by HTTP as a client does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from support_freezing_disk import FROZEN_FILE
from support_paths import PROJECT, SUPPORT

from kvtier_remote.valkey.embedded import free_ports

FOLDER = Path(__file__).parent
START_SECONDS = 900.0
ANSWER_SECONDS = 300.0
PAGE_TOKENS = 16
FROZEN = "frozen"
"""While a file of this name is in a server's folder, its disk does not answer."""
OPTIONS = {
    "device": "cpu", "attention-backend": "torch_native", "sampling-backend": "pytorch", "grammar-backend": "none",
    "max-total-tokens": 4096, "page-size": PAGE_TOKENS, "mem-fraction-static": 0.1, "hicache-ratio": 2.0,
    "hicache-mem-layout": "page_first_direct", "hicache-io-backend": "direct", "hicache-write-policy": "write_through",
    "hicache-storage-prefetch-policy": "timeout",
}  # fmt: skip
ADMIN_KEY = "test"
HEADERS = {"Content-Type": "application/json", "Authorization": f"Bearer {ADMIN_KEY}"}
FLAGS = (
    "disable-cuda-graph", "skip-tokenizer-init", "disable-overlap-schedule", "skip-server-warmup",
    "enable-hierarchical-cache", "enable-cache-report", "enable-metrics",
)  # fmt: skip


def make_model(folder: Path, vocab_size: int = 1024) -> Path:
    """A small Llama with random weights, the same each time."""
    from transformers import LlamaConfig, LlamaForCausalLM  # here, because it takes seconds

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=8192,
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


@dataclass(frozen=True)
class Answer:
    """The tokens of an answer, where its prompt's tokens came from, and how long it took."""

    tokens: list[int]
    cached: int
    details: dict[str, Any]
    seconds: float
    logprobs: list[float]

    @property
    def from_storage(self) -> int:
        return int(self.details.get("storage", 0))


class Server:
    """A running server."""

    def __init__(self, url: str, log: Path, process: subprocess.Popen[bytes]) -> None:
        self.url = url
        self.log = log
        self.process = process

    def ask(self, prompt: Sequence[int], new_tokens: int = 8, logprobs: bool = False) -> Answer:
        began = time.monotonic()
        sampling = {"max_new_tokens": new_tokens, "temperature": 0, "ignore_eos": True}
        asked = {"input_ids": list(prompt), "sampling_params": sampling, "return_logprob": logprobs}
        found = self.call("POST", "/generate", asked)
        about = found["meta_info"]
        details = about.get("cached_tokens_details") or {}
        said = [logprob for logprob, *_ in about.get("output_token_logprobs") or ()]
        return Answer(found["output_ids"], about["cached_tokens"], details, time.monotonic() - began, said)

    def flush(self) -> None:
        """Empty SGLang's own tiers; it refuses while something is under way."""
        self.until(lambda: self.status("POST", "/flush_cache") == 200, "the cache was not flushed")

    def metric(self, name: str) -> float:
        """The sum of a metric over its labels."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=ANSWER_SECONDS) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith((f"{name}{{", f"{name} ")))

    def until(self, condition: Any, failure: str, seconds: float = ANSWER_SECONDS) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{failure}; {self.tail()}")
            time.sleep(0.1)

    def status(self, method: str, path: str, body: Any = None) -> int:
        """The status of an answer."""
        try:
            self.call(method, path, body)
        except urllib.error.HTTPError as error:
            return error.code
        return 200

    def call(self, method: str, path: str, body: Any = None) -> Any:
        """An answer: what its JSON says, or its text. Raises HTTPError for another status than 200."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}{path}", data, HEADERS, method=method)
        with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer:
            text = answer.read().decode()
        try:
            return json.loads(text)
        except ValueError:
            return text

    def tail(self) -> str:
        """The end of the server's log."""
        return self.log.read_text(errors="replace")[-8000:]


@contextmanager
def server(model: Path, folder: Path, extra: dict[str, Any] | None, **options: Any) -> Iterator[Server]:
    """A server whose storage backend has these keys, `file` of SGLang when `extra` is None; it is ended at the end."""
    (port,) = free_ports(1)
    chosen = {**OPTIONS, "model-path": model, "port": port, "host": "127.0.0.1", **options}
    if extra is None:
        chosen["hicache-storage-backend"] = "file"
        extra = {"prefetch_threshold": PAGE_TOKENS}
    elif extra:
        chosen["hicache-storage-backend"] = "dynamic"
    if extra:
        chosen["hicache-storage-backend-extra-config"] = json.dumps(extra)
    arguments = [part for name, value in chosen.items() for part in (f"--{name}", str(value))]
    arguments += [f"--{flag}" for flag in FLAGS]
    path = os.pathsep.join(map(str, (FOLDER / "on_cpu", PROJECT, PROJECT / "backends", SUPPORT)))
    environment = os.environ | {"PYTHONPATH": path, "SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1"}
    environment |= {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(folder / "file"), "OMP_NUM_THREADS": "1"}
    environment[FROZEN_FILE] = str(folder / FROZEN)
    if "tp-size" in options:  # a processor for each rank
        environment["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(map(str, range(options["tp-size"])))
    log = folder / f"server-{port}.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "sglang.launch_server", *arguments],
            stdout=out, stderr=subprocess.STDOUT, env=environment, start_new_session=True,
        )  # fmt: skip
    running = Server(f"http://127.0.0.1:{port}", log, process)
    try:
        running.until(lambda: _ready(running), "the server did not start", START_SECONDS)
        yield running
    finally:
        _end(process)


def _ready(running: Server) -> bool:
    if running.process.poll() is not None:
        raise RuntimeError(f"the server has ended: {running.tail()}")
    try:
        return running.status("GET", "/health") == 200
    except (urllib.error.URLError, ConnectionError):
        return False


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a server with all its processes: politely, then by force."""
    with suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(60)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(60)

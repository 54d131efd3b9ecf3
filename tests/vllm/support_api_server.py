"""Real `vllm serve` processes of several releases in one test.

Each release is a process that has imported it and forks the servers, so that a start takes seconds: the import takes
12 s of CPU, and a server has three processes. Run as a script this module is that process.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from engines import ANSWER_SECONDS, ENVIRONMENT, EXIT_SECONDS, HERE, START_SECONDS

from kvtier_remote.valkey.embedded import free_ports

ENTRY = "vllm.entrypoints.launchers.api_server.entry"
"""What `vllm serve` calls; the command itself asks for a package `vllm`, which the one for CPUs is not."""
IMPORTED = [ENTRY, "vllm.entrypoints.openai.api_server", "vllm.v1.engine.core"]
IMPORTED += ["vllm.v1.worker.cpu_worker", "benchmarks.vllm_processes"]
HITS = "vllm:external_prefix_cache_hits_total"
ENDING = (signal.SIGTERM, signal.SIGINT)
TOP = 2
"""Tokens with the highest log-probabilities in an answer."""


class Release:
    """One release, installed, or in a folder that goes first on PYTHONPATH. `name` is its version.

    It has a cache of its own: in a shared one each start after an upgrade inspects the model again, for 20 s.
    """

    def __init__(self, folder: str, log: Path) -> None:
        path = [folder, *map(str, (HERE, HERE.parent / "support", HERE.parents[1])), os.environ.get("PYTHONPATH", "")]
        own = {"PYTHONPATH": os.pathsep.join(filter(None, path)), "VLLM_CACHE_ROOT": str(log.with_suffix(""))}
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, __file__],
                env={**os.environ, **ENVIRONMENT, **own},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                bufsize=1,
            )
        self.name = self._hear()
        assert self.name, log.read_text(errors="replace")

    def fork(self, arguments: list[str], log: Path) -> int:
        """The process of a new server, the leader of its group."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([arguments, str(log)]) + "\n")
        return int(self._hear())

    def _hear(self) -> str:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], START_SECONDS)
        return self._process.stdout.readline().strip() if ready else ""

    def close(self) -> None:
        """Kill its servers, and end."""
        with self._process:  # closes its input
            pass


@dataclass
class Said:
    """An answer: tokens, their log-probabilities, by how much the likeliest token was ahead at the closest place, and
    how many tokens of the prompt were cached."""

    tokens: list[int]
    logprobs: list[float]
    margin: float
    cached: int


class ApiServer:
    """`vllm serve`, started again and again. Every call has a deadline."""

    def __init__(self, model: Path, folder: Path, name: str, **options: Any) -> None:
        self.name, self.release, self.url, self._folder = name, "", "", folder
        self._arguments = ["--model", str(model), "--host", "127.0.0.1", "--served-model-name", "model"]
        self._arguments += ["--dtype", "float32", "--enforce-eager", "--enable-prompt-tokens-details"]
        for name, value in options.items():
            self._arguments += [f"--{name.replace('_', '-')}", value if isinstance(value, str) else json.dumps(value)]
        self._pid, self._pidfd, self._lives = 0, -1, 0
        self._client = httpx.Client(timeout=ANSWER_SECONDS, limits=httpx.Limits(max_keepalive_connections=0))

    def start(self, release: Release) -> None:
        """Start it, and wait until it answers."""
        (port,) = free_ports(1)
        self.release, self.url = release.name, f"http://127.0.0.1:{port}"
        self._log = self._folder / f"{self.name}-{self._lives}.log"
        self._lives += 1
        self._pid = release.fork([*self._arguments, "--port", str(port)], self._log)
        self._pidfd = os.pidfd_open(self._pid)
        until = time.monotonic() + START_SECONDS
        while not self._is_healthy():
            assert not self._has_ended(0.1), f"the server died:\n{self.tail()}"
            assert time.monotonic() < until, f"the server does not start:\n{self.tail()}"

    def _is_healthy(self) -> bool:
        try:
            return self._client.get(f"{self.url}/health", timeout=10.0).is_success
        except httpx.TransportError:
            return False

    def _has_ended(self, seconds: float) -> bool:
        return bool(select.select([self._pidfd], [], [], seconds)[0])

    def end(self, number: int) -> None:
        """End it by a signal, SIGKILL for all its processes at once."""
        if number == signal.SIGKILL:
            os.killpg(self._pid, number)
        else:
            os.kill(self._pid, number)
        assert self._has_ended(EXIT_SECONDS), f"the server does not end:\n{self.tail()}"
        with suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)
        os.close(self._pidfd)
        self._pid = 0

    def ask(self, prompt: list[int], tokens: int) -> Said:
        """The whole answer to a prompt. Raises httpx.HTTPError where there is none."""
        body = {"model": "model", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        body |= {"return_token_ids": True, "return_tokens_as_token_ids": True, "logprobs": TOP}
        answer = self._client.post(f"{self.url}/v1/completions", json=body)
        answer.raise_for_status()
        found = answer.json()
        (choice,) = found["choices"]
        if choice["finish_reason"] != "length":
            raise httpx.RemoteProtocolError(f"an answer that ended with {choice['finish_reason']}")
        tops = [sorted(each.values()) for each in choice["logprobs"]["top_logprobs"]]
        details = found["usage"]["prompt_tokens_details"] or {}
        return Said(
            choice["token_ids"],
            choice["logprobs"]["token_logprobs"],
            min(each[-1] - each[-2] for each in tops),
            details.get("cached_tokens") or 0,
        )

    def hits(self) -> float:
        """Tokens that came from kvtier in this life, by vLLM's own count."""
        page = self._client.get(f"{self.url}/metrics", timeout=60.0).raise_for_status().text
        return sum(float(line.rsplit(" ", 1)[1]) for line in page.splitlines() if line.startswith(HITS))

    def tail(self) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-60:])

    def close(self) -> None:
        """Kill it, if it still runs."""
        if self._pid:
            self.end(signal.SIGKILL)
        self._client.close()


# ---- in the process of a release


def main() -> None:
    """Import vLLM, say which, and fork a server for each line that comes. At the end of the input kill them all."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # for what vLLM prints
    for name in IMPORTED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # vLLM collects garbage several times at start, each for a second
    for number in ENDING:  # which its group may get: it ends with its input, not before its servers
        signal.signal(number, signal.SIG_IGN)
    print(sys.modules["vllm"].__version__, file=out)
    forked = []  # none is waited for, so no other process gets its number
    for line in sys.stdin:
        pid = os.fork()
        if not pid:
            _serve(*json.loads(line))
        forked.append(pid)
        print(pid, file=out)
    for pid in forked:
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    os._exit(0)


def _serve(arguments: list[str], log: str) -> None:
    """Be a server."""
    os.setsid()
    for number in ENDING:
        signal.signal(number, signal.SIG_DFL)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    file = os.open(log, os.O_WRONLY | os.O_CREAT)
    for number in (1, 2):
        os.dup2(file, number)
    sys.modules["benchmarks.vllm_processes"].fork_processes()
    sys.argv = ["vllm", *arguments]
    status = 1
    try:
        sys.modules[ENTRY].main()
        status = 0
    except Exception:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


if __name__ == "__main__":
    main()

"""LMCache's own programs in processes of their own: its multi-process server, and its two benchmarks."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from support_freezing_disk import FROZEN_FILE
from support_paths import PROJECT, SUPPORT

from kvtier_remote.valkey.embedded import free_ports

FOLDER = Path(__file__).parent
START_SECONDS = 300.0
ANSWER_SECONDS = 300.0
SHAPE = "(2,1024,16,8,64):float16:8"
"""Eight layers: an object of 256 tokens has 4 MiB."""
RUN = "from lmcache.cli.main import main; main()"


def l2_adapter(folder: Path, module: str = "kvtier.engines.lmcache", **keys: Any) -> str:
    """`--l2-adapter` for a tier of kvtier in a folder."""
    keys = {"roots": [str(folder / "kv")], "capacity": "1GiB", "namespace": "test", **keys}
    plugin = {"type": "plugin", "module_path": module, "class_name": "KVTierL2Adapter", "adapter_params": keys}
    return json.dumps(plugin)


def environment(folder: Path) -> dict[str, str]:
    """That of LMCache's programs: this tree's kvtier, behind what is in PYTHONPATH already."""
    inherited = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    path = os.pathsep.join([*inherited, *map(str, (PROJECT, PROJECT / "backends", SUPPORT, FOLDER))])
    own = {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_DISABLE_BANNER": "1", FROZEN_FILE: str(folder / "frozen")}
    return os.environ | own | {"PYTHONPATH": path}


def run(folder: Path, *arguments: str) -> str:
    """What a program of LMCache printed. Raises an AssertionError with that if it failed."""
    found = subprocess.run(
        [sys.executable, "-c", RUN, *arguments],
        check=False, capture_output=True, text=True, timeout=ANSWER_SECONDS, env=environment(folder),
    )  # fmt: skip
    assert found.returncode == 0, found.stdout[-4000:] + found.stderr[-4000:]
    return found.stdout


class Server:
    """A running multi-process server."""

    def __init__(self, folder: Path, adapter: str) -> None:
        self._folder = folder
        self._rpc, self._http, metrics = free_ports(3)
        options = {
            "supported-transfer-mode": "auto", "port": self._rpc, "http-port": self._http, "prometheus-port": metrics,
            "l1-size-gb": 1, "eviction-policy": "LRU", "l2-adapter": adapter,
        }  # fmt: skip
        self._log = folder / f"server-{self._rpc}.log"
        with self._log.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-c", RUN, "server", *_flags(options)],
                stdout=out, stderr=subprocess.STDOUT, env=environment(folder), start_new_session=True,
            )  # fmt: skip

    def until_ready(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while True:
            assert self.process.poll() is None, self.tail()
            with suppress(OSError, urllib.error.URLError):
                self._call("/healthcheck", None)
                return
            assert time.monotonic() < deadline, self.tail()
            time.sleep(0.1)

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + ANSWER_SECONDS
        while not condition():
            assert time.monotonic() < deadline, self.tail()
            time.sleep(0.1)

    def bench(self) -> tuple[int, set[str]]:
        """LMCache's benchmark of servers: four prompts of eight objects, each prompt twice. Returns how often it found
        a whole prompt, and the digests of what it computed or retrieved as a whole."""
        options = {
            "rpc-url": f"tcp://localhost:{self._rpc}", "mode": "cpu", "transfer-mode": "engine_driven", "start": 0,
            "num-tokens": 2048, "end": 4, "interval": 0.01, "kvcache-shape-spec": SHAPE,
        }  # fmt: skip
        printed = run(self._folder, "bench", "server", *_flags(options))
        found = printed.count("LOOKUP: 8/8 chunks hit")
        return found, set(re.findall(r"CHECKSUM: (\w+) \((?:1 ranks, )?8 chunks\)", printed))

    def clear_l1(self) -> None:
        self._call("/cache/clear", {})

    def metric(self, name: str) -> float:
        """The sum of a metric over its labels."""
        lines = self._call("/metrics", None).splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith((f"{name}{{", f"{name} ")))

    def _call(self, path: str, body: Any) -> str:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._http}{path}", data, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer:
            found: str = answer.read().decode()
        return found

    def tail(self) -> str:
        """The end of the server's log."""
        return self._log.read_text(errors="replace")[-8000:]


@contextmanager
def server(folder: Path, adapter: str) -> Iterator[Server]:
    """A server with an L2 adapter; it is ended at the end."""
    running = Server(folder, adapter)
    try:
        running.until_ready()
        yield running
    finally:
        with suppress(ProcessLookupError):
            running.process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            running.process.wait(60)
        with suppress(ProcessLookupError):
            os.killpg(running.process.pid, signal.SIGKILL)
        running.process.wait(60)


def _flags(options: dict[str, Any]) -> list[str]:
    return [part for name, value in options.items() for part in (f"--{name}", str(value))]

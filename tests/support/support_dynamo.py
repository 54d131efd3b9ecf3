"""The indexer of NVIDIA Dynamo's router, a real one: what it knows of the engines whose events it hears.

Its packages do not agree with vLLM's, so it runs in an environment of its own: `DYNAMO_PYTHON` names the interpreter.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvtier_remote.valkey.embedded import free_ports

START_SECONDS = 60.0
COMES_SECONDS = 60.0
MODEL = "model"
Block = tuple[int | None, int, int]
"""The hash of its parent, its own, and that of its tokens."""


def dynamo_python(request: pytest.FixtureRequest) -> str:
    """The interpreter with the indexer. Without one this ends the test: a failure with `-m router`, else a skip."""
    python = os.environ.get("DYNAMO_PYTHON")
    if python is None and importlib.util.find_spec("dynamo") is not None:
        python = sys.executable
    if python is None:
        if "router" in (request.config.getoption("-m") or ""):
            pytest.fail("no DYNAMO_PYTHON with ai-dynamo-runtime")
        pytest.skip("needs ai-dynamo-runtime: DYNAMO_PYTHON")
    return python


class DynamoIndexer:
    """An indexer that runs, asked through its HTTP interface."""

    def __init__(self, port: int, block_size: int) -> None:
        self._port, self._block_size = port, block_size

    def ask(self, path: str, **body: Any) -> Any:
        """What it answers. Raises OSError."""
        data = json.dumps(body).encode() if body else None
        headers = {"content-type": "application/json"}
        asked = urllib.request.Request(f"http://127.0.0.1:{self._port}{path}", data, headers)
        with urllib.request.urlopen(asked, timeout=START_SECONDS) as answer:
            return json.load(answer)

    def register(self, worker: int, endpoint: str) -> None:
        """Hear the events of an engine."""
        self.ask(
            "/register", instance_id=worker, endpoint=endpoint, model_name=MODEL, block_size=self._block_size, dp_rank=0
        )

    def unregister(self, worker: int) -> None:
        """Forget an engine and all it had."""
        self.ask("/unregister", instance_id=worker, model_name=MODEL)

    def matched(self, worker: int, tokens: Sequence[int]) -> dict[str, int]:
        """How many tokens of a prompt the worker has down to each tier: a tier counts what those above it have."""
        found = self.ask("/query", token_ids=list(tokens), model_name=MODEL)["instances"].get(str(worker), {})
        return {tier: found[tier] for tier in ("gpu", "cpu", "disk") if found.get(tier)}

    def blocks(self, worker: int) -> dict[str, set[Block]]:
        """What it has recorded of a worker, each tier by itself: `device`, `host_pinned`, `disk`."""
        tiers: dict[str, set[Block]] = {"device": set(), "host_pinned": set(), "disk": set()}
        for index in self.ask("/dump").values():
            for event in index["events"]:
                if event["worker_id"] == worker:
                    stored = event["event"]["data"]["stored"]
                    parent = stored["parent_hash"]
                    for block in stored["blocks"]:
                        tiers[event["storage_tier"]].add((parent, block["block_hash"], block["tokens_hash"]))
                        parent = block["block_hash"]
        return tiers


def until(condition: Callable[[], bool], found: Callable[[], str], seconds: float = COMES_SECONDS) -> None:
    """Wait for a condition; `found` says what there is instead."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, found()
        time.sleep(0.05)


@contextmanager
def dynamo_indexer(python: str, folder: Path, block_size: int) -> Iterator[DynamoIndexer]:
    """An indexer that hears nobody yet. It listens on every address of the machine, on a port that was free."""
    (port,) = free_ports(1)
    log = folder / "indexer.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [python, "-m", "dynamo.indexer", "--port", str(port)], stdout=output, stderr=output, cwd=folder
        )

    def answers() -> bool:
        assert process.poll() is None, f"the indexer ended:\n{log.read_text()[-2000:]}"
        try:
            indexer.ask("/workers")
        except OSError:
            return False
        return True

    try:
        indexer = DynamoIndexer(port, block_size)
        until(answers, lambda: "the indexer does not answer", START_SECONDS)
        yield indexer
    finally:
        process.terminate()
        process.wait(60)

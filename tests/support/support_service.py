"""A stack process of its own, and an engine of one process at it, for tests."""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from support_engine_client import EngineClient

from faults.machine import warm
from kvtier.client.connection import Identity
from kvtier.client.private import PrivateStack
from kvtier.client.request import ClientRequest
from kvtier.service.channel import is_listening
from kvtier.tier.contract import LookupResult
from kvtier.types.geometry import KVLayout
from kvtier.types.gpu_runs import GPURuns
from kvtier.types.jobs import GPUGroup, JobKind
from kvtier.types.keys import GroupIndex, JobId, OffloadKey, make_key
from kvtier.types.namespace import Namespace

PAGE = 4096
BLOCKS = 64
SECONDS = 60.0
NAMESPACE = Namespace(KVLayout.of_pages(PAGE), model="test")


def until(true: Callable[[], object], what: str = "", seconds: float = SECONDS) -> None:
    """Wait for a condition that another process or thread brings about."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, f"in {seconds:g} s not: {what or true}"
        time.sleep(0.005)


def block_keys(count: int, first: int = 0) -> tuple[OffloadKey, ...]:
    """Keys of single blocks, by number."""
    return tuple(make_key(number.to_bytes(16, "big"), 0) for number in range(first, first + count))


def content(numbers: Sequence[int]) -> torch.Tensor:
    """The bytes of blocks, which follow from their numbers."""
    return torch.stack([torch.full((PAGE,), number % 251, dtype=torch.uint8) for number in numbers])


def stack_text(rows: int = 2048, root: Path | None = None, **options: object) -> str:
    """A stack file of a CPU tier, and of a disk below it if there is a folder for it."""
    lines = [f"{name}: {value}" for name, value in options.items()]
    lines += ["tiers:", f"  - {{type: cpu, cpu_bytes_to_use: {rows * PAGE}}}"]
    if root is not None:
        root.mkdir(mode=0o700, exist_ok=True)
        lines.append(f"  - {{type: fs, roots: ['{root}'], capacity: 16MiB, min_free_bytes: 0}}")
    return "\n".join(lines) + "\n"


class TestEngine:
    """An engine with `BLOCKS` GPU blocks in this process. Block n of the key number n holds bytes of that number."""

    __test__ = False

    def __init__(self, at: str | PrivateStack, engine_id: str = "", device: str = "cpu") -> None:
        self.cache = torch.zeros((BLOCKS, PAGE), dtype=torch.uint8, device=device)
        self._ended: dict[JobId, list[str]] = {}
        private = at if isinstance(at, PrivateStack) else None
        path = at.path if isinstance(at, PrivateStack) else at
        identity = Identity(path, NAMESPACE, engine_id, secrets.token_hex(16), private)
        self.client = EngineClient(identity, [self.cache])

    def __enter__(self) -> TestEngine:
        return self

    def __exit__(self, *error: object) -> None:
        self.client.close()

    def step_until(self, true: Callable[[], object], what: str = "") -> None:
        """Step until a condition holds."""
        end = time.monotonic() + SECONDS
        while not true():
            assert time.monotonic() < end, f"not: {what or true}"
            self.step()
            self.client.wait(0.004)

    def step(self) -> None:
        """Step, and keep what ended."""
        for result in self.client.step():
            self._ended[result.job_id] = [outcome.status.value for group in result.outcomes for outcome in group]

    def begin(self, kind: JobKind, numbers: range, request: ClientRequest | None = None) -> JobId:
        """Begin a job for the blocks of these numbers, in the first GPU blocks."""
        runs = GPURuns.whole(list(range(len(numbers))))
        job = self.client.job(kind, [GPUGroup(GroupIndex(0), block_keys(len(numbers), numbers.start), runs)])
        self.client.submit(job, request)
        return job.job_id

    def finish(self, job_id: JobId) -> list[str]:
        """The status of each block of a job, once it has ended."""
        end = time.monotonic() + SECONDS
        while True:
            self.step()
            if job_id in self._ended:
                return self._ended.pop(job_id)
            assert time.monotonic() < end, "a job did not end"
            self.client.wait(0.004)

    def transfer(self, kind: JobKind, numbers: range, request: ClientRequest | None = None) -> list[str]:
        """A job for the blocks of these numbers; the status of each."""
        return self.finish(self.begin(kind, numbers, request))

    def store(self, numbers: range) -> list[str]:
        """Store blocks, once enough rows are lent."""
        self.step_until(lambda: len(self.client.core._lent) >= len(numbers), "rows are lent")
        self.cache[: len(numbers)] = content(numbers)
        return self.transfer(JobKind.STORE, numbers)

    def reserve(self, numbers: range, name: str) -> ClientRequest:
        """A request with what there is of these blocks in rows."""
        request = self.client.request(name)
        self.client.reserve(request, block_keys(len(numbers), numbers.start))
        self.step_until(lambda: request.served or not self.client.core.connected, "a reservation is served")
        return request

    def load(self, numbers: range, name: str = "r") -> list[str]:
        """Have blocks brought into rows and load them: `hit` with the right bytes, or why not."""
        request = self.reserve(numbers, name)
        self.cache[: len(numbers)] = 255
        found = self.transfer(JobKind.LOAD, numbers, request)
        right, cache = content(numbers), self.cache.cpu()
        for at, status in enumerate(found):
            if status == "loaded":
                assert torch.equal(cache[at], right[at]), f"wrong bytes for block {numbers[at]}"
                found[at] = "hit"
        return found

    def look(self, numbers: range, name: str = "l") -> list[LookupResult]:
        """Presence of blocks, once it is known."""
        keys = block_keys(len(numbers), numbers.start)
        request = self.client.request(name, keys)
        self.step_until(lambda: request.served or not self.client.core.connected)
        found = self.client.lookup(request, keys)
        request.end()
        return found


def on_disk(path: str) -> int:
    """Blocks that a process has stored on its disk."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(10)
        sock.connect(path)
        document = b"".join(iter(lambda: sock.recv(1 << 16), b""))
    return int(json.loads(document)["stats"]["tiers"]["fs"]["stored"])


def peer_pid(path: str) -> int:
    """The process that listens at a socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.settimeout(5.0)
        sock.connect(path)
        return int(struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0])


def kill_listener(path: str) -> None:
    """Kill the process that listens at a socket, and wait until it has closed all that it had open: its threads may
    outlive the first one by a moment."""
    pid = peer_pid(path)
    os.kill(pid, signal.SIGKILL)

    def is_gone() -> bool:
        try:
            return not is_listening(path) or peer_pid(path) != pid
        except (ConnectionError, FileNotFoundError):  # it ended between the two
            return True
        except BlockingIOError:  # it ends slowly, and these looks have filled its queue
            return False

    until(is_gone, "it is gone")


@contextmanager
def stack_process(
    stack: Path, path: str, first: str = "", options: Sequence[str] = ()
) -> Iterator[subprocess.Popen[str]]:
    """`kvtier serve`, once it listens; killed at the end if it still runs. `first` is code that runs before it."""
    code = f"{first}\nfrom kvtier.cli import main; main()"
    command = [sys.executable, "-c", code, "serve", str(stack), "--socket", path, *options]
    with warm.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            until(lambda: is_listening(path) or process.poll() is not None, f"{path} listens")
            assert process.poll() is None, process.communicate()
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def end(process: subprocess.Popen[str], number: int = signal.SIGTERM) -> tuple[int, str]:
    """(status, stderr) of a process after a signal."""
    os.kill(process.pid, number)
    _, errors = process.communicate(timeout=SECONDS)
    return process.returncode, errors

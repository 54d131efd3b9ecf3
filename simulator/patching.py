"""Simulated threads, and putting a simulated system under the modules of a backend's package."""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, ParamSpec, TypeVar
from unittest import mock

import aiofiles

from kvtier.aio.daemon_pool import DaemonPool
from kvtier.aio.process_lock import keep_from_children, share_with_children
from kvtier.stack import assembly
from kvtier.tier import shared_epoch
from simulator.syscalls import Killed, SimulatedSystem

P = ParamSpec("P")
T = TypeVar("T")


class SimulatedThreads(Executor):
    """The backend's threads: each call runs whole at its own time, between any two callbacks of the loop."""

    def __init__(self, system: SimulatedSystem) -> None:
        self._system = system
        self._in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """The future is the loop's own, which `asyncio.wrap_future` takes as it is; a callback completes it."""
        system = self._system
        future = system.loop.create_future()

        def deliver(complete: Callable[[Any], None], value: object) -> None:
            if not future.done():
                complete(value)

        def work() -> None:
            self._in_flight -= 1
            if not future.done():
                try:
                    result = fn(*args, **kwargs)
                except Killed:
                    return
                except BaseException as error:
                    system.loop.call_soon(deliver, future.set_exception, error)
                else:
                    system.loop.call_soon(deliver, future.set_result, result)
            if not self._in_flight:
                system.loop.call_soon(self._idle.set)

        self._in_flight += 1
        self._idle.clear()
        system.loop.outside(system.fault_profile.thread_seconds(system.rng), work)
        return future  # type: ignore[return-value]

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """There is nothing to release."""

    async def close(self, timeout_seconds: float) -> int:
        """Wait for the calls in flight. Returns how many are stuck at the deadline."""
        try:
            if self._in_flight:
                await asyncio.wait_for(self._idle.wait(), timeout_seconds)
        except TimeoutError:
            return self._in_flight
        return 0


class _AsyncFile:
    """What `aiofiles.open` gives: the calls run on the executor that was named."""

    def __init__(self, system: SimulatedSystem, fd: int, executor: Executor) -> None:
        self._system, self._fd, self._executor = system, fd, executor

    async def _run(self, fn: Callable[..., T], *args: object) -> T:
        return await self._system.loop.run_in_executor(self._executor, fn, self._fd, *args)

    async def read(self, length: int = 1 << 20) -> bytes:
        return await self._run(self._system.read, length)

    async def write(self, data: bytes) -> int:
        return await self._run(self._system.write, data)

    async def close(self) -> None:
        await self._run(self._system.close)


def _aiofiles(system: SimulatedSystem) -> SimpleNamespace:
    async def open_file(name: str, mode: str, opener: Callable[[str, int], int], executor: Executor) -> _AsyncFile:
        flags = os.O_RDONLY if mode == "rb" else os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        fd = await system.loop.run_in_executor(executor, opener, name, flags)
        return _AsyncFile(system, fd, executor)

    return SimpleNamespace(open=open_file)


_MODULES: dict[int, str] = {
    id(os): "os",
    id(fcntl): "fcntl",
    id(time): "time",
    id(socket): "socket",
    id(aiofiles): "aio",
    id(DaemonPool): "DaemonPool",
    id(keep_from_children): "unforked",
    id(share_with_children): "unforked",
}
_FUNCTIONS = ("fallocate", "rename_new", "filesystem_magic", "statx_direct")


@contextmanager
def without_threads_on_disk() -> Iterator[None]:
    """Leave out what threads of a stack do on disks that are not simulated, until the block ends.

    What policies learn is not kept, and the folders of tiers are not compared: simulated ones are distinct.
    """

    async def compare_nothing(*_: object) -> None:
        return

    with mock.patch.multiple(assembly, model_files=lambda *_: None, check_folders=compare_nothing):
        yield


Opening = tuple[dict[str, Any], str, str]
"""A module's names, one of them, and what stands in for it."""


def openings(package: str) -> list[Opening]:
    """Where the loaded modules of a backend's package touch the machine, and where epochs are chosen at random."""
    found: list[Opening] = [(vars(shared_epoch), "secrets", "secrets")]
    for module_name in sorted(sys.modules):
        if module_name == package or module_name.startswith(f"{package}."):
            names = vars(sys.modules[module_name])
            for name, value in list(names.items()):
                own = name in _FUNCTIONS and str(getattr(value, "__module__", "")).startswith(f"{package}.")
                stand_in = name if own else _MODULES.get(id(value))
                if stand_in is not None:
                    found.append((names, name, stand_in))
            found.append((names, "open", "open"))
    return found


@contextmanager
def patched_modules(places: Iterable[Opening], system: SimulatedSystem) -> Iterator[None]:
    """Let the modules that `openings` listed run on a simulated system, until the block ends."""
    clock = SimpleNamespace(
        time=system.wall,
        monotonic=system.loop.time,
        perf_counter=system.loop.time,
        strftime=time.strftime,
        localtime=time.gmtime,
    )
    locks = {name: getattr(fcntl, name) for name in ("LOCK_EX", "LOCK_SH", "LOCK_NB", "LOCK_UN")}
    stand_ins: dict[str, object] = {
        "os": system,
        "fcntl": SimpleNamespace(flock=system.flock, **locks),
        "time": clock,
        "secrets": SimpleNamespace(randbits=system.rng.getrandbits, token_bytes=system.rng.randbytes),
        "socket": SimpleNamespace(gethostname=lambda: "simulated"),
        "aio": _aiofiles(system),
        "open": system.open_object,
        "fallocate": system.fallocate,
        "rename_new": system.rename_new,
        "filesystem_magic": lambda fd: 0xEF53,
        "statx_direct": lambda fd: None,
        "unforked": lambda fd: None,
        "DaemonPool": lambda name, limit: SimulatedThreads(system),
    }
    missing = object()
    before = [(names, name, names.get(name, missing)) for names, name, _ in places]
    for names, name, stand_in in places:
        names[name] = stand_ins[stand_in]
    try:
        yield
    finally:
        for names, name, value in before:
            if value is missing:
                del names[name]
            else:
                names[name] = value

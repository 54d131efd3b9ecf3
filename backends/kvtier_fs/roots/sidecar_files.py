"""The small readable files of a root: its owner, and the namespaces of its blocks.

For people and error messages only; no decision depends on them. File objects live on the root's threads.
"""

import asyncio
import json
import os
import re
import socket
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from functools import partial
from typing import Any, Literal, TypeVar

import aiofiles

from kvtier.aio.shielded_wait import shielded_wait
from kvtier.errors import RootError
from kvtier.types.geometry import round_up
from kvtier_fs.roots.folder import LOCK_NAME, GuardedFolder

T = TypeVar("T")

OWNER_BYTES_MAX = 4096
_DISK_BLOCK_BYTES = 4096
_MANIFEST_NAME = re.compile(r"manifest-([0-9a-f]{32})\.json(\.new)?")


def manifest_name(namespace: bytes) -> str:
    """The file that describes a namespace."""
    return f"manifest-{namespace.hex()}.json"


async def _with_file(
    folder: GuardedFolder, name: str, mode: Literal["rb", "wb"], executor: Executor, use: Callable[[Any], Awaitable[T]]
) -> T:
    """Open a text file and use it. Raises OSError or RootError. Goes on to its end when cancelled."""

    async def opened() -> T:
        # Not `async with`: leaving it, aiofiles closes the file on the event loop's own threads.
        file = await aiofiles.open(name, mode, opener=folder.open_file, executor=executor)
        try:
            return await use(file)
        finally:
            await file.close()

    return await shielded_wait(asyncio.ensure_future(opened()))


async def read_owner(folder: GuardedFolder, executor: Executor) -> str:
    """The holder of a root's lock, in words. Only for a message: it never fails."""
    try:
        return owner_in_words(
            await _with_file(folder, LOCK_NAME, "rb", executor, lambda file: file.read(OWNER_BYTES_MAX))
        )
    except (OSError, RootError):
        return owner_in_words(b"")


def owner_in_words(text: bytes) -> str:
    """The owner that a lock file names, in words."""
    try:
        owner = json.loads(text)
        started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(float(owner["start"])))
        return f"process {int(owner['pid'])} on {str(owner['host'])[:64]!r} since {started}"
    except (ValueError, TypeError, KeyError, OverflowError, OSError):
        return "another process"


def owner_text() -> bytes:
    """The text of a lock file for this process."""
    owner = {"pid": os.getpid(), "host": socket.gethostname()[:64], "start": round(time.time())}
    return json.dumps(owner).encode()


async def write_owner(folder: GuardedFolder, executor: Executor) -> None:
    """Write this process's name into the lock file. Raises OSError."""
    await _with_file(folder, LOCK_NAME, "wb", executor, lambda file: file.write(owner_text()))


async def write_manifest(folder: GuardedFolder, namespace: bytes, text: str, executor: Executor) -> None:
    """Describe a namespace in a file of its own, replaced in one step. Raises OSError."""
    name = manifest_name(namespace)
    await _with_file(folder, f"{name}.new", "wb", executor, lambda file: file.write(text.encode() + b"\n"))
    replace = partial(os.replace, f"{name}.new", name, src_dir_fd=folder.fd, dst_dir_fd=folder.fd)
    await asyncio.get_running_loop().run_in_executor(executor, replace)


def make_room_for_manifest(folder: GuardedFolder, namespaces: list[bytes], own_bytes: int, room_bytes: int) -> bool:
    """Remove manifests until one of `own_bytes` fits: that of the namespace at hand, which comes first in
    `namespaces`, and those unused for longest. Returns False if it does not fit at all. Raises OSError.
    """
    sizes, own = {}, round_up(own_bytes, _DISK_BLOCK_BYTES)
    for name in os.listdir(folder.fd):
        match = _MANIFEST_NAME.fullmatch(name)
        if match is None:
            continue
        if match[2] or bytes.fromhex(match[1]) not in namespaces[1:]:
            os.unlink(name, dir_fd=folder.fd)
        else:
            status = os.stat(name, dir_fd=folder.fd, follow_symlinks=False)
            sizes[bytes.fromhex(match[1])] = round_up(status.st_size, _DISK_BLOCK_BYTES)
    room = room_bytes - own
    for namespace in sorted(sizes, key=namespaces.index):
        room -= sizes[namespace]
        if room < 0:
            os.unlink(manifest_name(namespace), dir_fd=folder.fd)
    return room_bytes >= own

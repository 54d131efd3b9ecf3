"""The small readable files of a root: who owns it, and which namespaces its blocks belong to.

For people and error messages only; nothing is ever trusted because of them. File objects live on the root's threads.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import time
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial

import aiofiles

from kvtier.errors import RootError
from kvtier.outlast import outlast
from kvtier_fs.folder import LOCK_NAME, RootFolder

OWNER_BYTES_MAX = 4096
_MANIFEST_NAME = re.compile(r"manifest-([0-9a-f]{32})\.json(\.new)?")


def manifest_name(namespace: bytes) -> str:
    """The file that describes a namespace."""
    return f"manifest-{namespace.hex()}.json"


async def _read(folder: RootFolder, name: str, executor: Executor) -> bytes:
    """The beginning of a text file. Raises OSError or RootError. Goes on to its end when cancelled."""
    return await outlast(asyncio.ensure_future(_read_file(folder, name, executor)))


async def _read_file(folder: RootFolder, name: str, executor: Executor) -> bytes:
    # Not `async with`: leaving it, aiofiles closes the file on the event loop's own threads.
    file = await aiofiles.open(name, "rb", opener=_opener(folder), executor=executor)
    try:
        return await file.read(OWNER_BYTES_MAX)
    finally:
        await file.close()


async def _write(folder: RootFolder, name: str, text: bytes, executor: Executor) -> None:
    """Replace a text file's contents. Raises OSError or RootError. Goes on to its end when cancelled."""
    await outlast(asyncio.ensure_future(_write_file(folder, name, text, executor)))


async def _write_file(folder: RootFolder, name: str, text: bytes, executor: Executor) -> None:
    file = await aiofiles.open(name, "wb", opener=_opener(folder), executor=executor)
    try:
        await file.write(text)
    finally:
        await file.close()


def _opener(folder: RootFolder) -> Callable[[str, int], int]:
    def opener(name: str, flags: int) -> int:
        return folder.open_file(name, flags)

    return opener


async def read_owner(folder: RootFolder, executor: Executor) -> str:
    """Who holds a root's lock, in words. Only for a message: never fails, whatever the file holds."""
    try:
        return owner_in_words(await _read(folder, LOCK_NAME, executor))
    except (OSError, RootError):
        return owner_in_words(b"")


def owner_in_words(text: bytes) -> str:
    """What a lock file says of its owner, whatever it holds."""
    try:
        owner = json.loads(text)
        started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(float(owner["start"])))
        return f"process {int(owner['pid'])} on {str(owner['host'])[:64]!r} since {started}"
    except (ValueError, TypeError, KeyError, OverflowError, OSError):
        return "another process"


async def write_owner(folder: RootFolder, executor: Executor) -> None:
    """Put this process's name on the lock it holds. Raises OSError."""
    owner = {"pid": os.getpid(), "host": socket.gethostname()[:64], "start": round(time.time())}
    await _write(folder, LOCK_NAME, json.dumps(owner).encode(), executor)


async def write_manifest(folder: RootFolder, namespace: bytes, text: str, executor: Executor) -> None:
    """Describe a namespace in a file of its own, replaced in one step. Raises OSError."""
    name = manifest_name(namespace)
    await _write(folder, f"{name}.new", text.encode() + b"\n", executor)
    replace = partial(os.replace, f"{name}.new", name, src_dir_fd=folder.fd, dst_dir_fd=folder.fd)
    await asyncio.get_running_loop().run_in_executor(executor, replace)


def make_room_for_manifest(folder: RootFolder, namespaces: list[bytes], own_bytes: int, room_bytes: int) -> bool:
    """Remove manifests until one of `own_bytes` fits: that of the namespace at hand, which comes first in
    `namespaces`, and those unused for longest. Returns False if it does not fit at all. Raises OSError.
    """
    sizes = {}
    for name in os.listdir(folder.fd):
        match = _MANIFEST_NAME.fullmatch(name)
        if match is None:
            continue
        if match[2] or bytes.fromhex(match[1]) not in namespaces[1:]:
            os.unlink(name, dir_fd=folder.fd)
        else:
            status = os.stat(name, dir_fd=folder.fd, follow_symlinks=False)
            sizes[bytes.fromhex(match[1])] = _blocks_bytes(status.st_size)
    room = room_bytes - _blocks_bytes(own_bytes)
    for namespace in sorted(sizes, key=namespaces.index):
        room -= sizes[namespace]
        if room < 0:
            os.unlink(manifest_name(namespace), dir_fd=folder.fd)
    return room_bytes >= _blocks_bytes(own_bytes)


def _blocks_bytes(size: int) -> int:
    return -(-size // 4096) * 4096

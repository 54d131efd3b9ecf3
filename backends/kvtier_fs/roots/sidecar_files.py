"""The small readable files of a root, one for each namespace of its blocks.

For people only; no decision depends on them. File objects live on the root's threads.
"""

import asyncio
import os
import re
from concurrent.futures import Executor
from functools import partial

import aiofiles

from kvtier.aio.shielded_wait import shielded_wait
from kvtier.types.geometry import round_up
from kvtier_fs.roots.folder import GuardedFolder

_DISK_BLOCK_BYTES = 4096
MANIFEST_NAME = re.compile(r"manifest-([0-9a-f]{32})\.json(\.new)?")


def manifest_name(namespace: bytes) -> str:
    """The file that describes a namespace."""
    return f"manifest-{namespace.hex()}.json"


async def write_manifest(folder: GuardedFolder, namespace: bytes, text: str, executor: Executor) -> None:
    """Describe a namespace in a file of its own, replaced in one step. Raises OSError. Goes on when cancelled."""
    name = manifest_name(namespace)

    async def written() -> None:
        # Not `async with`: leaving it, aiofiles closes the file on the event loop's own threads.
        file = await aiofiles.open(f"{name}.new", "wb", opener=folder.open_file, executor=executor)
        try:
            await file.write(text.encode() + b"\n")
        finally:
            await file.close()

    await shielded_wait(written())
    replace = partial(os.replace, f"{name}.new", name, src_dir_fd=folder.fd, dst_dir_fd=folder.fd)
    await asyncio.get_running_loop().run_in_executor(executor, replace)


def make_room_for_manifest(folder: GuardedFolder, namespaces: list[bytes], own_bytes: int, room_bytes: int) -> bool:
    """Remove manifests until one of `own_bytes` fits: that of the namespace at hand, which comes first in
    `namespaces`, and those unused for longest. Returns False if it does not fit at all. Raises OSError.
    """
    sizes, own = {}, round_up(own_bytes, _DISK_BLOCK_BYTES)
    for name in os.listdir(folder.fd):
        match = MANIFEST_NAME.fullmatch(name)
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

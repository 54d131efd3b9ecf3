"""Opening a shared root: is it there, is it ours to use, how is it laid out, which epoch counts."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress

from kvtier.errors import GeometryError, ResourceError, RootError
from kvtier.geometry import Geometry, round_up
from kvtier_fs.files.folder import Busy
from kvtier_fs.files.leases import Leases
from kvtier_fs.files.places import Quota, choose_buckets, choose_fan_out, quota
from kvtier_fs.files.records import Tree
from kvtier_fs.files.root import FilesSeams, SharedRoot
from kvtier_fs.io.contract import IOEngine
from kvtier_fs.io.probe import probe_direct
from kvtier_fs.io.threads import ThreadsEngine
from kvtier_fs.io.uring import UringEngine
from kvtier_fs.opening import MISSING, choose_engine
from kvtier_fs.options import FSOptions
from kvtier_fs.slot import DIGEST_BYTES, MIN_HEADER_BYTES
from kvtier_fs.texts import manifest_name

_EPOCH_WAIT_SECONDS = 0.01


async def enter_root(root: SharedRoot, options: FSOptions) -> Tree | None:
    """Open the root's folder and look at its disk. Returns its tree, None if it has none yet.

    Raises RootError, or OSError for what the disk does.
    """
    if not await root.call(root.folder.enter):
        raise RootError(root.path, MISSING)
    if options.direct != "off":
        root.probe = await root.call(probe_direct, root.folder.fd)
    if options.direct == "required" and not root.probe.direct:
        raise RootError(
            root.path, f"direct I/O is required but {root.probe.reason}; choose another disk or direct: auto"
        )
    return await root.call(root.folder.look)


def new_tree(options: FSOptions, geometry: Geometry, header_bytes: int, root_uuid: bytes) -> Tree:
    """How a root that is empty is laid out."""
    sizes = file_sizes(geometry, header_bytes)
    buckets = choose_buckets(options.capacity, max(sizes))
    fan_out = choose_fan_out(options.capacity // buckets // min(sizes))
    return Tree(root_uuid, header_bytes, geometry.alignment, buckets, fan_out)


def file_sizes(geometry: Geometry, header_bytes: int) -> tuple[int, ...]:
    """Bytes of a block's file for each group: header page and payload."""
    return tuple(header_bytes + geometry.aligned_bytes(group) for group in range(geometry.num_groups))


def lay_out(path: str, stored: Tree | None, options: FSOptions, geometry: Geometry, needed: int) -> tuple[Tree, Quota]:
    """The tree a stack uses, and what its capacity means in it. `needed`: the disk's alignment for direct I/O.

    Raises GeometryError, or RootError if the root was laid out for something else.
    """
    header = max(MIN_HEADER_BYTES, needed, stored.header_bytes if stored is not None else 0)
    if geometry.alignment % header:
        raise GeometryError(f"rows are aligned to {geometry.alignment} bytes but the disk needs {header}")
    tree = stored or new_tree(options, geometry, header, bytes(DIGEST_BYTES))
    if tree.header_bytes != header:
        raise RootError(
            path,
            f"was laid out for a disk alignment of {tree.header_bytes} bytes, this stack needs {header}; "
            f"use another folder or empty this one",
        )
    if tree.row_alignment != geometry.alignment:
        raise RootError(
            path,
            f"was laid out for rows aligned to {tree.row_alignment} bytes, this stack aligns to {geometry.alignment}; "
            f"use another folder or empty this one",
        )
    return tree, quota(tree, options.capacity, file_sizes(geometry, header))


async def settle(root: SharedRoot, stored: Tree | None, options: FSOptions, geometry: Geometry) -> Quota:
    """Take a lease in the root, and make the root unless it is made. Raises GeometryError, RootError, OSError.

    The lease comes first: a temporary without one may be swept by anybody, also that of a superblock.
    """
    needed = root.probe.offset_alignment
    tree, share = lay_out(root.path, stored, options, geometry, needed)
    await root.call(root.folder.join)
    holder = await root.call(root.seams.holder)
    root.leases = Leases(root.lease, holder, asyncio.get_running_loop().time, root.seams.lease_seconds)
    if stored is not None:
        await root.call(root.folder.settle, tree)
        root.settle(tree, share)
    root.leased = True
    await root.with_room(lambda: root.call(root.leases.take, root.folder.leases_fd))
    if stored is None:
        made = new_tree(options, geometry, tree.header_bytes, root.seams.random_bytes(DIGEST_BYTES))
        stored = await root.call(root.folder.make, made, root.temporary())
        tree, share = lay_out(root.path, stored, options, geometry, needed)
        await root.call(root.folder.settle, tree)
        root.settle(tree, share)
    return share


async def change_epoch(root: SharedRoot, change: Callable[[str], int | Busy]) -> int:
    """Begin or raise an epoch, also where the disk is full. `change` takes the name of a temporary. Raises RootError
    where another process keeps the lock, OSError for what the disk does."""
    return await root.with_room(lambda: until_free(root, lambda: root.call(change, root.temporary())))


async def until_free(root: SharedRoot, attempt: Callable[[], Awaitable[int | Busy]]) -> int:
    """Try to change an epoch until no other process is at it. Raises RootError after `lock_seconds`."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + root.seams.lock_seconds
    while True:
        epoch = await attempt()
        if not isinstance(epoch, Busy):
            return epoch
        if loop.time() >= deadline:
            raise RootError(root.path, "another process holds the lock of the epochs; is it stopped or hung?")
        await asyncio.sleep(_EPOCH_WAIT_SECONDS)


async def describe(root: SharedRoot, namespace: bytes, manifest: str, share: Quota) -> str:
    """Keep the namespace's readable manifest beside its data. Returns a note if that is not to be."""
    name, text = manifest_name(namespace), manifest.encode() + b"\n"
    try:
        if await root.call(os.access, name, os.F_OK, dir_fd=root.folder.fd, follow_symlinks=False):
            return ""
        if await root.call(root.folder.small_bytes) + round_up(len(text), 4096) > share.root_bytes:
            return f"{root.path}: no room for the readable manifest ({len(text)} bytes)"
        await root.call(root.folder.publish, root.folder.fd, name, text, root.temporary())
    except OSError as error:
        return f"{root.path}: the readable manifest could not be written ({error.strerror})"
    return ""


async def start_engine(root: SharedRoot, options: FSOptions) -> tuple[IOEngine, str]:
    """The engine that serves, and a note if it is not the one hoped for. Raises ResourceError."""
    loop = asyncio.get_running_loop()
    if root.seams.engine is not None:
        return root.seams.engine(), ""
    name, note = await choose_engine(root.files, options)
    if name != "io_uring":
        return ThreadsEngine(loop, root.io_threads, options.io_threads), note
    engine = UringEngine(loop, options.io_depth)
    try:
        engine.open()
    except ResourceError as error:
        if options.io_engine == "io_uring":
            raise
        return ThreadsEngine(loop, root.io_threads, options.io_threads), f"{error}; threads serve instead"
    return engine, note


def make_root(options: FSOptions, seams: FilesSeams, counters: Counter[str]) -> SharedRoot:
    """The root the options name; nothing is opened yet."""
    return SharedRoot(options.roots[0], options, seams, counters)


async def leave(root: SharedRoot, timeout_seconds: float) -> int:
    """Give the lease up, close everything, end the threads. Returns how many of them are stuck, at the deadline."""
    try:
        async with asyncio.timeout(timeout_seconds):
            await root.clear(timeout_seconds / 2)
            await root.calls_ended()  # a folder must not be closed under a call that works in it
            if root.leased:
                with suppress(OSError):
                    await root.call(root.leases.release, root.folder.leases_fd)
            await root.call(root.folder.leave)
    except TimeoutError:
        return 1  # every thread is stuck in a file call
    stuck = await root.io_threads.close(timeout_seconds)
    return stuck + await root.files.close(timeout_seconds)

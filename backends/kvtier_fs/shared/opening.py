"""Opening a shared root: the checks of its folder, its layout and lease. The dry run of all that for `kvtier check`."""

import asyncio
import os
from dataclasses import replace

from kvtier.errors import GeometryError, RootError
from kvtier.tier.block_envelope import MIN_HEADER_BYTES
from kvtier.tier.registry import DryRun
from kvtier.types.geometry import Geometry, round_up
from kvtier_fs.format.superblock import UUID_BYTES
from kvtier_fs.format.tree_records import Tree
from kvtier_fs.io.contract import IOEngine
from kvtier_fs.io.probe import DirectProbe
from kvtier_fs.options import SharedFSOptions
from kvtier_fs.roots import disk
from kvtier_fs.roots.disk import choose_engine, make_engine
from kvtier_fs.roots.folder import manifest_name
from kvtier_fs.shared.folder import TreeFolder
from kvtier_fs.shared.leases import FolderLeases
from kvtier_fs.shared.paths import ROOT_BYTES, bucket_budget, choose_buckets, choose_fan_out
from kvtier_fs.shared.root import SharedRoot


async def enter_root(root: SharedRoot, options: SharedFSOptions) -> Tree | None:
    """Open the root's folder and probe its disk. Returns its tree, None if it has none yet.

    Raises RootError, or OSError for what the disk does.
    """
    if not await root.call(root.folder.enter):
        raise RootError(root.path, disk.ROOT_MISSING)
    await root.call(root.folder.make_private)
    root.probe = await root.call(disk.probe_disk, root.path, root.folder.fd, options)
    return await root.call(root.folder.read_tree)


def lay_out(
    path: str, stored: Tree | None, options: SharedFSOptions, geometry: Geometry, needed: int
) -> tuple[Tree, int]:
    """The tree a stack uses, and the bytes that each of its buckets may take.

    `needed` is the disk's alignment for direct I/O.
    Raises GeometryError, or RootError if the root was laid out for something else.
    """
    header = max(MIN_HEADER_BYTES, needed, stored.header_bytes if stored is not None else 0)
    if geometry.alignment % header:
        raise GeometryError(f"rows are aligned to {geometry.alignment} bytes but the disk needs {header}")
    sizes = tuple(header + geometry.aligned_bytes(group) for group in range(geometry.num_groups))
    buckets = choose_buckets(options.capacity, max(sizes))
    fan_out = choose_fan_out(options.capacity // buckets // min(sizes))
    tree = stored or Tree(bytes(UUID_BYTES), header, geometry.alignment, buckets, fan_out)
    disk.check_laid_out(path, tree, header, geometry.alignment)
    return tree, bucket_budget(tree, options.capacity, sizes)


async def join_root(root: SharedRoot, stored: Tree | None, options: SharedFSOptions, geometry: Geometry) -> None:
    """Take a lease in the root, and make the root unless it is made. Raises GeometryError, RootError, OSError.

    The lease comes first: any process may sweep a temporary without one, also that of a superblock.
    """
    needed = root.probe.offset_alignment
    tree, budget = lay_out(root.path, stored, options, geometry, needed)
    await root.call(root.folder.join)
    holder, clock = await root.call(root.hooks.holder), asyncio.get_running_loop().time
    root.leases = FolderLeases(root.folder.leases_fd, root.lease, holder, clock, root.hooks.lease_seconds)
    if stored is not None:
        root.use_tree(tree, budget)
    root.leased = True
    await root.with_room(lambda: root.call(root.leases.take))
    if stored is None:
        made = replace(tree, root_uuid=root.hooks.random_bytes(UUID_BYTES))
        stored = await root.call(root.folder.make, made, root.temporary())
        tree, budget = lay_out(root.path, stored, options, geometry, needed)
        root.use_tree(tree, budget)


async def describe(root: SharedRoot, namespace: bytes, manifest: str) -> str:
    """Keep the namespace's readable manifest beside its data. Returns a note if that is not possible."""
    name, text = manifest_name(namespace), manifest.encode() + b"\n"
    try:
        if await root.call(os.access, name, os.F_OK, dir_fd=root.folder.fd, follow_symlinks=False):
            return ""
        if await root.call(root.folder.small_bytes) + round_up(len(text), 4096) > ROOT_BYTES:
            return f"{root.path}: no room for the readable manifest ({len(text)} bytes)"
        await root.call(root.folder.publish, root.folder.fd, name, text, root.temporary())
    except OSError as error:
        return f"{root.path}: the readable manifest could not be written ({error.strerror})"
    return ""


async def start_engine(root: SharedRoot, options: SharedFSOptions) -> tuple[IOEngine, str]:
    """The I/O engine, and a note if it is not the preferred one. Raises ResourceError."""
    if root.hooks.engine is not None:
        root.hold_engine(engine := root.hooks.engine())
        return engine, ""
    name, note = await root.call(choose_engine, options)
    return make_engine(name, root.io_threads, options, root.hold_engine), note


def dry_run(options: SharedFSOptions, geometry: Geometry, probe: bool) -> DryRun:
    """The mode, and the problems of opening. Without `probe` it is arithmetic over the options alone.

    With it the root is probed, briefly and blocking: nothing is created, nothing is written but a nameless file.
    """
    path, problems, notes = options.root, list[str](), list[str]()
    stored, found = None, DirectProbe(False)
    if probe:
        folder = TreeFolder(path, options.model_copy(update={"create": False}))
        try:
            stored, found, notes = disk.dry_probe(folder, options, folder.read_tree)
        except RootError as error:
            problems.append(str(error))
    try:
        lay_out(path, stored, options, geometry, found.offset_alignment)
    except (GeometryError, RootError) as error:
        problems.append(str(error))
    return disk.dry_run("files", options, found.direct if probe else None, notes, problems)

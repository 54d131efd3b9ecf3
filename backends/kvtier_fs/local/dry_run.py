"""What the tier would be on this machine, found without opening it: for `kvtier check`."""

from contextlib import suppress
from dataclasses import replace

from kvtier.errors import GeometryError, ResourceError, RootBusyError, RootError
from kvtier.tier.contract import SlotSpace
from kvtier.tier.memory_limits import SystemLimits
from kvtier.tier.registry import DryRun
from kvtier.types.geometry import Geometry
from kvtier_fs.format.superblock import Superblock
from kvtier_fs.io.probe import DirectProbe
from kvtier_fs.io.thread_pools import RootPools
from kvtier_fs.local.folder import SlabFolder
from kvtier_fs.local.layout import check_index, lay_out
from kvtier_fs.local.root import Root
from kvtier_fs.options import FSOptions
from kvtier_fs.roots import disk


def dry_run(options: FSOptions, geometry: Geometry, probe: bool) -> DryRun:
    """The space, the mode, and what would go wrong. Without `probe` it is arithmetic over the options alone.

    With it each root is probed, briefly and blocking: nothing is created, nothing is written but a nameless file.
    """
    problems: list[str] = []
    notes: list[str] = []
    roots = []
    for path in options.roots:
        root = _unopened(path, options)
        roots.append(root)
        if probe:
            try:
                notes += _probe(root, options)
            except RootError as error:
                problems.append(str(error))
    space = None
    try:
        layout = lay_out(roots, options, geometry)
        space = SlotSpace(layout.plan.region_bytes, (layout.plan.regions,) * len(roots), layout.slot_bytes)
        notes += layout.notes
        if probe:
            check_index(layout, len(roots), SystemLimits())
    except (GeometryError, ResourceError) as error:
        problems.append(str(error))
    direct = all(root.probe.direct for root in roots) if probe else None
    return replace(disk.dry_run("slab", options, direct, notes, problems), space=space)


def _unopened(path: str, options: FSOptions) -> Root:
    """A root without a lock, whose threads never start."""
    folder = SlabFolder(path, options.model_copy(update={"create": False}))
    return Root(folder, RootPools.of(path, 1), DirectProbe(False))


def _probe(root: Root, options: FSOptions) -> list[str]:
    """Probe one root. Returns notes; raises RootError for what would keep it from opening."""
    stored, root.probe, notes = disk.dry_probe(root.folder, options, lambda: _read_superblock(root))
    root.stored = stored
    return notes


def _read_superblock(root: Root) -> Superblock | None:
    with suppress(FileNotFoundError):
        if owner := root.folder.live_owner():
            raise RootBusyError(root.path, owner)
    return root.folder.known_superblock(root.folder.read_superblock())

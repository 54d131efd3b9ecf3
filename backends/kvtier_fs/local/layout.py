"""The layout of roots for a KV layout, and the facts that a session begins with."""

from collections import Counter
from dataclasses import dataclass

from kvtier.errors import GeometryError, ResourceError
from kvtier.options import INDEX_BYTES_PER_SLOT
from kvtier.tier.block_envelope import MIN_HEADER_BYTES, SlotHeader
from kvtier.tier.memory_limits import MemoryLimits, tightest
from kvtier.types.geometry import Geometry, round_up
from kvtier.types.keys import GROUP_BYTES, OffloadKey, key_group
from kvtier_fs.format.region_header import RegionDemand, RegionPlan, choose_plan, snapshot_bytes
from kvtier_fs.local.root import Root
from kvtier_fs.options import FSOptions
from kvtier_fs.roots.disk import check_laid_out


@dataclass(frozen=True, slots=True)
class Layout:
    """The layout of roots for a KV layout: bytes of each root, regions, sizes of slots and payloads by group."""

    share: int
    plan: RegionPlan
    row_alignment: int
    slot_bytes: tuple[int, ...]
    payload_bytes: tuple[int, ...]
    notes: tuple[str, ...]

    @property
    def header_bytes(self) -> int:
        return self.plan.header_bytes

    @property
    def snapshot_bytes(self) -> int:
        """Bytes of a root that the snapshot of a clean close may take."""
        return snapshot_bytes(self.share, min(self.slot_bytes))


@dataclass(frozen=True, slots=True)
class RootSession:
    """The facts that a session begins with: the layout of the roots, the namespace, its manifest, its epoch."""

    layout: Layout
    namespace: bytes
    manifest: str
    epoch: int

    def counts(self, header: SlotHeader) -> bool:
        """True if a header describes a block of this namespace and epoch, of a size that this layout stores."""
        group, layout = header.group, self.layout
        return (
            header.namespace == self.namespace
            and header.epoch == self.epoch
            and group < len(layout.slot_bytes)
            and header.slot_bytes == layout.slot_bytes[group]
            and header.payload_bytes == layout.payload_bytes[group]
            and len(header.key) > GROUP_BYTES
            and key_group(OffloadKey(header.key)) == group
        )


def header_bytes(roots: list[Root]) -> int:
    """Bytes of a header page, the same in every root."""
    stored = [root.stored.header_bytes for root in roots if root.stored is not None]
    return max(MIN_HEADER_BYTES, *(root.probe.offset_alignment for root in roots), *stored)


def check_alignment(roots: list[Root], row_alignment: int, header: int) -> None:
    """Rows must suit every disk, and what is stored must have been laid out for rows like these.

    Raises GeometryError or RootError.
    """
    for root in roots:
        if root.stored is not None:
            check_laid_out(root.path, root.stored, header, row_alignment)
    wanted = max(root.probe.alignment for root in roots)
    if row_alignment % wanted or row_alignment % header:
        raise GeometryError(f"rows are aligned to {row_alignment} bytes but the disks need {max(wanted, header)}")


def plan_regions(roots: list[Root], demand: RegionDemand, region_bytes: int | None) -> tuple[RegionPlan, list[str]]:
    """The regions of every root: as they are laid out already, if that still works, else anew. Raises GeometryError."""
    notes = []
    strides = Counter(root.stored.stride for root in roots if root.stored is not None)
    for stride, _ in strides.most_common():
        plan = demand.with_stride(stride)
        if demand.fits(plan):
            if region_bytes is not None and region_bytes // demand.header_bytes * demand.header_bytes != stride:
                notes.append(f"region_bytes is {stride} since the roots were made; empty them to change it")
            return plan, notes
    return choose_plan(demand, region_bytes), notes


def lay_out(roots: list[Root], options: FSOptions, geometry: Geometry) -> Layout:
    """Decide how these roots are laid out. Raises GeometryError or RootError."""
    header = header_bytes(roots)
    check_alignment(roots, geometry.alignment, header)
    payloads = tuple(geometry.aligned_bytes(group) for group in range(geometry.num_groups))
    sizes = tuple(round_up(header + payload, header) for payload in payloads)
    capacity = options.capacity
    if options.index_slots_max is not None:
        capacity = min(capacity, options.index_slots_max * min(sizes))
    share = capacity // len(options.roots) // 4096 * 4096
    demand = RegionDemand(share, len(roots), sizes, header)
    plan, notes = plan_regions(roots, demand, options.region_bytes)
    return Layout(share, plan, geometry.alignment, sizes, payloads, tuple(notes))


def check_index(layout: Layout, roots: int, limits: MemoryLimits) -> None:
    """Raise ResourceError if the directory in memory, of every slot of all roots, would be larger than memory."""
    slots = roots * layout.plan.regions * layout.plan.slots(min(layout.slot_bytes))
    need, reading = slots * INDEX_BYTES_PER_SLOT, tightest(limits)
    if reading is not None and reading.have_bytes < need:
        raise ResourceError(
            f"the index of {slots} slots needs {need} bytes of memory but {reading.where} offers {reading.have_bytes}: "
            f"lower capacity or set index_bytes_max"
        )

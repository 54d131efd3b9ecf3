"""Place arithmetic of the slab layout, and the header page in front of every region. No I/O."""

import struct
from dataclasses import dataclass

from kvtier.errors import GeometryError
from kvtier.tier.block_envelope import COUNTER_LIMIT
from kvtier.tier.checksum import BODY_AT, seal, unseal
from kvtier.types.geometry import round_up
from kvtier_fs.format.superblock import FORMAT_VERSION

REGIONS_PER_FILE = 64
"""Part of format version 1: how many regions one slab file holds."""

REGION_MAGIC = b"KVTIERRG"
LARGE_REGION_BYTES = 256 << 20
SMALL_REGION_BYTES = 64 << 20
WANTED_SLOTS = 16
WANTED_REGIONS = 8
PLANS_TRIED = 512
"""At most about so many numbers of regions are compared, however large the capacity."""

_FIXED_RESERVE_BYTES = 32 << 10
_RESERVE_BYTES_PER_SLOT = 112
_SNAPSHOT_FIXED_BYTES = 8 << 10
_SNAPSHOT_BYTES_PER_SLOT = 56
_MANIFEST_SHARE = 64
_MANIFESTS_BYTES_MAX = 256 << 10
_HEADER = struct.Struct("<II16sIIQQ")


@dataclass(frozen=True, slots=True)
class RegionHeader:
    """The header of a region: its root, its place and its format. `region` counts within its root."""

    root_uuid: bytes
    region: int
    slot_bytes: int
    generation: int


def encode_region_header(header: RegionHeader, page: memoryview) -> None:
    """Fill a header page; what the header does not use is zero."""
    fields = (FORMAT_VERSION, len(page), header.root_uuid, header.region, 0, header.slot_bytes, header.generation)
    page[:] = seal(REGION_MAGIC, _HEADER.pack(*fields), len(page))


def decode_region_header(page: memoryview) -> RegionHeader | None:
    """The header a page holds; None if it is no whole region header of this format."""
    body = unseal(REGION_MAGIC, page) if len(page) >= BODY_AT + _HEADER.size else None
    if body is None:
        return None
    version, header_bytes, uuid, region, _, slot_bytes, generation = _HEADER.unpack_from(body)
    if (version, header_bytes) != (FORMAT_VERSION, len(page)) or generation >= COUNTER_LIMIT:
        return None
    return RegionHeader(uuid, region, slot_bytes, generation)


@dataclass(frozen=True, slots=True)
class RegionPlan:
    """The regions of each root: `regions` stretches of `stride` bytes, a header page first and then slots of one size.

    Region i of a root begins at byte `(i % REGIONS_PER_FILE) * stride` of slab file `i // REGIONS_PER_FILE`.
    """

    stride: int
    header_bytes: int
    regions: int

    @property
    def region_bytes(self) -> int:
        """Bytes of a region that slots can use."""
        return self.stride - self.header_bytes

    @property
    def files(self) -> int:
        """Slab files of a root."""
        return -(-self.regions // REGIONS_PER_FILE)

    def regions_of(self, file: int) -> range:
        """The regions that lie in a slab file."""
        return range(file * REGIONS_PER_FILE, min((file + 1) * REGIONS_PER_FILE, self.regions))

    def file_of(self, region: int) -> int:
        """The slab file that a region lies in."""
        return region // REGIONS_PER_FILE

    def region_offset(self, region: int) -> int:
        """The offset of a region in its file, its header page first."""
        return region % REGIONS_PER_FILE * self.stride

    def slot_offset(self, region: int, index: int, slot_bytes: int) -> int:
        """The offset of a slot in its file, its header page first."""
        return region % REGIONS_PER_FILE * self.stride + self.header_bytes + index * slot_bytes

    def can_be_formatted(self, slot_bytes: int) -> bool:
        """True if slots can have this size: a header page and more, of whole header pages, within a region."""
        return self.header_bytes < slot_bytes <= self.region_bytes and slot_bytes % self.header_bytes == 0

    def slots(self, slot_bytes: int) -> int:
        """Slots of one size that a region holds."""
        return self.region_bytes // slot_bytes


def manifests_bytes(share: int) -> int:
    """Bytes of a root that the readable manifests may take."""
    return min(_MANIFESTS_BYTES_MAX, share // _MANIFEST_SHARE // 4096 * 4096)


def snapshot_bytes(share: int, smallest_slot: int) -> int:
    """Bytes of a root that the snapshot of a clean close may take: room for keys of 40 bytes in every slot."""
    return (_SNAPSHOT_FIXED_BYTES + _SNAPSHOT_BYTES_PER_SLOT * (share // smallest_slot)) // 4096 * 4096


def reserve_bytes(share: int, smallest_slot: int) -> int:
    """Bytes of a root's share that regions must leave: superblock, lock, folder, manifests, the snapshot of a clean
    close, and the extent tree, which file systems count as the slab files' own."""
    per_slot = _RESERVE_BYTES_PER_SLOT * (share // smallest_slot)
    return round_up(_FIXED_RESERVE_BYTES + manifests_bytes(share) + per_slot, 4096)


@dataclass(frozen=True, slots=True)
class RegionDemand:
    """The demand on a plan: the bytes of one root, the roots, the slot sizes, the header page that aligns offsets."""

    share: int
    roots: int
    slot_sizes: tuple[int, ...]
    header_bytes: int

    @property
    def room(self) -> int:
        """Bytes of one root that regions may take."""
        return self.share - reserve_bytes(self.share, min(self.slot_sizes))

    @property
    def regions_needed(self) -> int:
        """Regions each root needs so that every slot size can have one."""
        return -(-len(set(self.slot_sizes)) // self.roots)

    @property
    def bytes_needed(self) -> int:
        """The smallest capacity, over all roots, that works."""
        regions = self.regions_needed * (self.header_bytes + max(self.slot_sizes))
        share = regions
        while share - reserve_bytes(share, min(self.slot_sizes)) < regions:
            share = regions + reserve_bytes(share, min(self.slot_sizes))
        return share * self.roots

    def fits(self, plan: RegionPlan) -> bool:
        """True if every slot size can have a region and each region holds at least one of its slots."""
        return (
            plan.regions >= self.regions_needed
            and plan.stride % self.header_bytes == 0
            and plan.region_bytes >= max(self.slot_sizes)
        )

    def with_stride(self, stride: int) -> RegionPlan:
        """A plan with as many regions of a given size as there is room for."""
        return RegionPlan(stride, self.header_bytes, max(0, self.room) // stride)

    def bytes_held(self, plan: RegionPlan) -> int:
        """Bytes of slots that fit, for the slot size the plan suits least."""
        return min(plan.regions * plan.slots(size) * size for size in self.slot_sizes)


def choose_plan(demand: RegionDemand, region_bytes: int | None = None) -> RegionPlan:
    """The plan of a new root: regions of 64 to 256 MiB with at least 16 slots, smaller where the capacity is small.

    `region_bytes` sets the size instead. Raises GeometryError, naming the bytes needed, if not every slot size can
    have a region with one slot.
    """
    largest = max(demand.slot_sizes)
    if region_bytes is not None:
        plan = demand.with_stride(max(demand.header_bytes, region_bytes // demand.header_bytes * demand.header_bytes))
        if plan.region_bytes < largest:
            raise GeometryError(
                f"region_bytes is {region_bytes} but one block needs a region of {demand.header_bytes + largest} bytes"
            )
    elif demand.room < demand.regions_needed * (demand.header_bytes + largest):
        plan = RegionPlan(demand.header_bytes, demand.header_bytes, 0)
    else:
        plan = _best_plan(demand)
    if not demand.fits(plan):
        raise GeometryError(
            f"capacity is {demand.share * demand.roots} bytes over {demand.roots} root(s) but this layout needs at "
            f"least {_needed(demand, region_bytes)}: {len(set(demand.slot_sizes))} block size(s), "
            f"the largest {largest} bytes with its header"
        )
    return plan


def _needed(demand: RegionDemand, region_bytes: int | None) -> int:
    if region_bytes is None:
        return demand.bytes_needed
    return demand.bytes_needed + demand.roots * demand.regions_needed * region_bytes


def _best_plan(demand: RegionDemand) -> RegionPlan:
    """Among plans with a suitable number of regions, the one that holds most."""
    largest = max(demand.slot_sizes)
    wanted_slots = demand.header_bytes + WANTED_SLOTS * largest
    target = min(max(demand.room // 64, SMALL_REGION_BYTES), LARGE_REGION_BYTES)
    most = max(demand.room // wanted_slots, demand.regions_needed)
    wanted = max(demand.regions_needed, -(-WANTED_REGIONS // demand.roots))
    fewest = min(max(demand.room // max(target, wanted_slots), wanted), most)
    plans = []
    for regions in range(fewest, min(2 * fewest, most) + 1, max(1, fewest // PLANS_TRIED)):
        stride = demand.room // regions // demand.header_bytes * demand.header_bytes
        slots = max(1, (stride - demand.header_bytes) // largest)
        plans.append(RegionPlan(demand.header_bytes + slots * largest, demand.header_bytes, regions))
        plans.append(RegionPlan(stride, demand.header_bytes, regions))
    usable = [plan for plan in plans if demand.fits(plan) and plan.regions * plan.stride <= demand.room]
    if not usable:
        return RegionPlan(demand.header_bytes, demand.header_bytes, 0)
    return max(usable, key=lambda plan: (demand.bytes_held(plan), -plan.stride))

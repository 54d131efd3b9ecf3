"""A value: the block envelope of the core in front of a payload, and the verification of every load."""

from dataclasses import dataclass

from kvtier.tier.block_age import NO_AGE_LIMIT, AgeLimit
from kvtier.tier.block_envelope import (
    COUNTER_LIMIT,
    KEY_AT,
    PACK_OWN,
    SLOT_MAGIC,
    Mismatch,
    found_by_sharer,
    pack_shared,
    stated_generation,
    verify_block,
)
from kvtier.tier.checksum import SHORT_BYTES, seal
from kvtier.types.geometry import Geometry
from kvtier.types.keys import GroupIndex, OffloadKey, key_group
from kvtier_remote.transport import Marker, Value

_HEADER_UNIT = 64
KEY_BYTES_MAX = 4096
HEADER_BYTES_MAX = -(-(KEY_AT + KEY_BYTES_MAX) // _HEADER_UNIT) * _HEADER_UNIT


def header_bytes(key: OffloadKey) -> int:
    """The bytes of a value in front of its payload: 192 for a key of 36 bytes."""
    return -(-(KEY_AT + len(key)) // _HEADER_UNIT) * _HEADER_UNIT


def value_bytes_max(geometry: Geometry) -> int:
    """The bytes of the largest value of a layout."""
    payload = max(geometry.aligned_bytes(GroupIndex(group)) for group in range(geometry.num_groups))
    return payload + HEADER_BYTES_MAX


def root_of(marker: Marker) -> bytes:
    """The incarnation as it stands in a header."""
    return marker.incarnation.ljust(16, b"\0")


class Headers:
    """The headers of one namespace's values under one marker. What all of them share is packed once.

    A value has no place on a disk: the fields of one are zero, and the incarnation is in that of the root.
    """

    def __init__(self, namespace: bytes, marker: Marker) -> None:
        self._shared_fields = namespace, marker.epoch, root_of(marker)
        self._shared: dict[int, bytes] = {}

    def encoded(self, key: OffloadKey, payload_bytes: int, generation: int, digest: bytes) -> bytes:
        """A header as it stands in front of its payload, which has this checksum."""
        length = header_bytes(key)
        return seal(SLOT_MAGIC, self._pack_fixed(length, key, payload_bytes, generation) + digest + key, length)

    def _pack_fixed(self, length: int, key: OffloadKey, payload_bytes: int, generation: int) -> bytes:
        shared = self._shared.get(length)
        if shared is None:
            shared = self._shared[length] = pack_shared(length, *self._shared_fields)
        own = length + payload_bytes, payload_bytes, generation, key_group(key), len(key)
        return shared + PACK_OWN(0, 0, 0, *own, 0)

    def verify(
        self, page: memoryview, payload: memoryview, key: OffloadKey, ages: AgeLimit = NO_AGE_LIMIT
    ) -> Mismatch | bytes:
        """The payload's checksum if everything holds, else the first thing that does not; GENERATION if it is too old.

        A reader does not know the generation beforehand; the header's own counts if its checksum holds. Transports
        verify on threads; short payloads keep the GIL, which a thread beside one that is busy in Python gets back late.
        """
        stated = stated_generation(page)
        generation = stated if stated < COUNTER_LIMIT else 0
        fixed, short = self._pack_fixed(len(page), key, len(payload), generation), len(payload) <= SHORT_BYTES
        found = found_by_sharer(verify_block(page, payload, fixed, key, keep_gil=short), page, payload)
        if isinstance(found, bytes) and not ages.allows(generation):
            return Mismatch.GENERATION
        return found


@dataclass(slots=True, eq=False)
class RemoteBlock:
    """A block of a job. `found` is what a load has verified: the payload's checksum, or what differs."""

    group: int
    position: int
    row: int
    value: Value
    key: OffloadKey
    headers: Headers
    found: Mismatch | bytes = Mismatch.PAYLOAD_BYTES

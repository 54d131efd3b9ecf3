"""A value judged by its name and its bytes alone, without what a load expects."""

from kvtier.tier.block_envelope import (
    COUNTER_LIMIT,
    KEY_AT,
    Mismatch,
    decode_slot_header,
    first_difference,
    key_fault,
    page_fault,
    stated_generation,
    stated_length,
)
from kvtier.tier.checksum import checksum
from kvtier_remote.names import BlockName, key_digest
from kvtier_remote.value import HEADER_BYTES_MAX, root_of

_NANOSECONDS = 1_000_000_000


def stated_header_bytes(front: memoryview) -> int:
    """The length of the header that a value begins with, as it says itself; 0 if it is none."""
    length = stated_length(front)
    return length if KEY_AT <= length <= HEADER_BYTES_MAX else 0


def stated_time(front: memoryview) -> float | None:
    """The time of a value's store, in seconds since 1970, from its header; None if it is none."""
    if not stated_header_bytes(front):
        return None
    generation = stated_generation(front)
    return generation / _NANOSECONDS if generation < COUNTER_LIMIT else None


def fault_of(name: BlockName, value: memoryview) -> str:
    """The fault of a value that was found under a name; empty if a load would take it."""
    page = value[: stated_header_bytes(value)]
    header = decode_slot_header(page)
    if header is None:
        return page_fault(page or value[:HEADER_BYTES_MAX]) or Mismatch.VERSION
    payload = value[len(page) :]
    expected = header._replace(
        namespace=name.namespace + header.namespace[len(name.namespace) :],
        epoch=name.marker.epoch,
        root_uuid=root_of(name.marker),
        region=0,
        slot_index=0,
        region_generation=0,
        slot_bytes=len(value),
        payload_bytes=len(payload),
    )
    fault = first_difference(header, expected) or key_fault(header)
    if fault or key_digest(header.key) != name.key:
        return fault or Mismatch.KEY
    return "" if checksum(payload) == header.payload_digest else Mismatch.PAYLOAD

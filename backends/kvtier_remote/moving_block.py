"""A block of a job on its way."""

from dataclasses import dataclass

from kvtier.tier.block_envelope import Mismatch
from kvtier.types.keys import OffloadKey
from kvtier_remote.transport import Value
from kvtier_remote.value import Headers


@dataclass(slots=True, eq=False)
class MovingBlock:
    """A block of a job. `found` is what a load has verified: the payload's checksum, or what differs."""

    group: int
    position: int
    row: int
    value: Value
    key: OffloadKey
    headers: Headers
    found: Mismatch | bytes = Mismatch.PAYLOAD_BYTES

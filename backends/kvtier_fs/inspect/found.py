"""The content of the place of a block, as its header page states it offline: a block, a leftover, damage, nothing."""

import errno
import os
from dataclasses import dataclass
from typing import NamedTuple

import xxhash

from kvtier.tier.block_age import stored_at
from kvtier.tier.block_envelope import Mismatch, SlotHeader, first_difference, key_fault
from kvtier.tier.inspection import BlockState, StoredBlock

SHORT = "truncated"
_PIECE_BYTES = 1 << 20


class HeaderVerdict(NamedTuple):
    """The kind of a header page. Without a state it holds no block; with a `fault` it is damaged, and that is where."""

    state: BlockState | None = None
    header: SlotHeader | None = None
    fault: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class SlotContent:
    """The content of one place: `slot` of `region`, which takes `stored_bytes`. Its payload begins at `payload_at` of
    the file `fd`. `used_at` (seconds since 1970) is None in a layout that does not keep it."""

    judged: HeaderVerdict
    region: int
    slot: int
    stored_bytes: int
    fd: int
    payload_at: int
    used_at: float | None

    @property
    def block(self) -> StoredBlock | None:
        """The block as the tools list it; None if this is none."""
        state, header, _ = self.judged
        if state is None or header is None:
            return None
        return StoredBlock(
            state=state,
            namespace=header.namespace,
            group=header.group,
            key=header.key,
            region=self.region,
            slot=self.slot,
            generation=header.generation,
            payload_bytes=header.payload_bytes,
            stored_bytes=self.stored_bytes,
            stored_at=stored_at(header.generation),
            used_at=self.used_at,
            epoch=header.epoch,
        )


def judge_header(header: SlotHeader, expected: SlotHeader, epoch: int | None) -> HeaderVerdict:
    """Judge a header that lies in its own place, by the fields that are known of that place and by its namespace's
    epoch (None: no epoch counts)."""
    fault = key_fault(header) if header == expected else first_difference(header, expected)
    if not fault and (epoch is None or header.epoch > epoch):
        fault = Mismatch.EPOCH
    if fault:
        return HeaderVerdict(fault=fault)
    return HeaderVerdict(BlockState.CURRENT if header.epoch == epoch else BlockState.OLD, header)


def payload_fault(fd: int, offset: int, header: SlotHeader) -> str:
    """The fault of the payload at an offset; empty if it is what was stored. Read in pieces."""
    piece = memoryview(bytearray(min(_PIECE_BYTES, header.payload_bytes)))
    digest, left = xxhash.xxh3_128(), header.payload_bytes
    while left:
        try:
            length = os.preadv(fd, [piece[:left]], offset)
        except OSError as error:
            return read_fault(error)
        if not length:
            return SHORT
        digest.update(piece[:length])
        offset, left = offset + length, left - length
    return "" if digest.digest() == header.payload_digest else Mismatch.PAYLOAD


def read_fault(error: OSError) -> str:
    """The reason for a place that cannot be read."""
    return f"unreadable_{errno.errorcode.get(error.errno or 0, 'unknown')}"

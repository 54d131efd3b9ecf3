"""What lies in a block's place in a root of layout `files`: a block, a leftover, damage. Links are never followed."""

import errno
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kvtier.tier_api.block_envelope import KEY_AT, Mismatch, SlotHeader, decode_slot_header
from kvtier.tier_api.inspection import BlockState
from kvtier_fs.files.block_file import GONE, Wrong, vanished
from kvtier_fs.files.paths import BlockPlace, occupied, place_of
from kvtier_fs.format.tree_records import Tree
from kvtier_fs.inspect.found import MAGIC, SHORT, Found, Judged, key_fault, page_fault, read_fault
from kvtier_fs.roots.folder import open_plain

NO_PLAIN_FILE = "file"

EpochOf = Callable[[bytes, int], int | None]
"""The epoch of a namespace that counts, given the one that a block states; None if none does."""


@dataclass(frozen=True, slots=True, eq=False)
class FoundFile(Found):
    """A file that has the name of a block. `fd` is -1 where nothing could be opened; `wrong` identifies the file when
    it is removed."""

    place: BlockPlace
    wrong: Wrong


@contextmanager
def opened_file(
    leaf_fd: int, place: BlockPlace, number: int, tree: Tree, epoch_of: EpochOf
) -> Iterator[FoundFile | None]:
    """What lies in a place, open meanwhile; None if it is gone. Only plain files are opened. `number`: in its bucket.

    Raises OSError.
    """
    fd, found = -1, None
    try:
        with vanished():
            status = os.stat(place.name, dir_fd=leaf_fd, follow_symlinks=False)
            judged, front = Judged(fault=NO_PLAIN_FILE), b""
            if stat.S_ISREG(status.st_mode):
                try:
                    fd = open_plain(leaf_fd, place.name, os.O_RDONLY)
                    status = os.fstat(fd)
                    page = memoryview(os.pread(fd, tree.header_bytes, 0))
                    judged, front = judge_file(page, status.st_size, place, tree, epoch_of), bytes(page[:KEY_AT])
                except OSError as error:
                    if error.errno in GONE:
                        raise
                    if error.errno != errno.ELOOP:
                        judged = Judged(fault=read_fault(error))
            found = FoundFile(
                judged=judged,
                region=place.bucket,
                slot=number,
                stored_bytes=occupied(status),
                fd=fd,
                payload_at=tree.header_bytes,
                used_at=status.st_mtime,
                place=place,
                wrong=Wrong(status.st_ino, front),
            )
        yield found
    finally:
        if fd >= 0:
            os.close(fd)


def judge_file(page: memoryview, length: int, place: BlockPlace, tree: Tree, epoch_of: EpochOf) -> Judged:
    """Judge the header page of a file of `length` bytes that lies in a place; the payload is not read."""
    if len(page) < tree.header_bytes:
        return Judged(fault=SHORT)
    header = decode_slot_header(page)
    if header is None:
        return Judged(fault=page_fault(page) or MAGIC)
    if header.root_uuid != tree.root_uuid:
        return Judged(BlockState.FOREIGN, header)
    due = place_of(tree, header.namespace, header.key)
    if due.name != place.name:
        return Judged(fault=Mismatch.KEY)
    if due != place:
        return Judged(BlockState.ORPHANED, header)
    fault = _field_fault(header, length, place, len(page))
    if fault:
        return Judged(fault=fault)
    epoch = epoch_of(header.namespace, header.epoch)
    if epoch is None or header.epoch > epoch:
        return Judged(fault=Mismatch.EPOCH)
    return Judged(BlockState.CURRENT if header.epoch == epoch else BlockState.OLD, header)


def _field_fault(header: SlotHeader, length: int, place: BlockPlace, header_bytes: int) -> str:
    """The first wrong field of a header that lies in its own place; empty if all are right."""
    if header.region != place.bucket:
        return Mismatch.REGION
    if header.slot_index:
        return Mismatch.SLOT_INDEX
    if header.region_generation:
        return Mismatch.REGION_GENERATION
    if header.slot_bytes != length:
        return SHORT if length < header.slot_bytes else Mismatch.SLOT_BYTES
    if not header.payload_bytes or header.payload_bytes != length - header_bytes:
        return Mismatch.PAYLOAD_BYTES
    return key_fault(header)

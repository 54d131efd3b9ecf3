"""What lies in a block's place in a root of layout `files`: a block, a leftover, damage. Links are never followed."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from kvtier.inspection import BlockState, StoredBlock
from kvtier_fs.files.blockfile import GONE, Wrong
from kvtier_fs.files.folder import open_plain
from kvtier_fs.files.places import BlockPlace, bucket_name, occupied, place_of
from kvtier_fs.files.records import Tree
from kvtier_fs.inspect_reading import SHORT, read_fault
from kvtier_fs.inspect_slots import MAGIC, Judged, key_fault, page_fault
from kvtier_fs.slot import KEY_AT, SlotHeader, decode_slot_header
from kvtier_fs.verify import Mismatch

NO_PLAIN_FILE = "file"
_NANOSECONDS = 1_000_000_000

EpochOf = Callable[[bytes, int], int | None]
"""The epoch of a namespace that counts, given the one that a block claims; None if none does."""


class Found(NamedTuple):
    """A file of a block's name. `fd` is -1 where nothing could be opened; `wrong` tells it again when it is to go."""

    place: BlockPlace
    judged: Judged
    status: os.stat_result
    wrong: Wrong
    fd: int = -1

    @property
    def where(self) -> str:
        """Its path within the root."""
        return path_of(self.place)


def path_of(place: BlockPlace) -> str:
    """Where a block lies, as people read it."""
    return "/".join(part for part in (bucket_name(place.bucket), place.leaf, place.name) if part)


@contextmanager
def looked_at(leaf_fd: int, place: BlockPlace, tree: Tree, epoch_of: EpochOf) -> Iterator[Found | None]:
    """What a header says of the file in a place, open meanwhile; None if it is gone. Only plain files are opened."""
    try:
        status = os.stat(place.name, dir_fd=leaf_fd, follow_symlinks=False)
    except OSError as error:
        if error.errno not in GONE:
            raise
        yield None
        return
    fd = -1
    try:
        found = Found(place, Judged(fault=NO_PLAIN_FILE), status, Wrong(status.st_ino))
        if stat.S_ISREG(status.st_mode):
            try:
                fd = open_plain(leaf_fd, place.name, os.O_RDONLY)
                found = _read(fd, place, tree, epoch_of)
            except OSError as error:
                if error.errno not in (*GONE, errno.ELOOP):
                    found = found._replace(judged=Judged(fault=read_fault(error)))
                elif error.errno != errno.ELOOP:
                    yield None
                    return
        yield found
    finally:
        if fd >= 0:
            os.close(fd)


def _read(fd: int, place: BlockPlace, tree: Tree, epoch_of: EpochOf) -> Found:
    status = os.fstat(fd)
    page = memoryview(os.pread(fd, tree.header_bytes, 0))
    wrong = Wrong(status.st_ino, bytes(page[:KEY_AT]))
    if len(page) < tree.header_bytes:
        return Found(place, Judged(fault=SHORT), status, wrong, fd)
    return Found(place, judge_file(page, status.st_size, place, tree, epoch_of), status, wrong, fd)


def judge_file(page: memoryview, length: int, place: BlockPlace, tree: Tree, epoch_of: EpochOf) -> Judged:
    """Judge the header page of a file of `length` bytes that lies in a place; the payload is not looked at."""
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
    """What a header in its own place says wrongly of its file or of itself; empty if nothing."""
    if header.region != place.bucket:
        return Mismatch.REGION
    if header.slot_index:
        return Mismatch.SLOT_INDEX
    if header.region_generation:
        return Mismatch.REGION_GENERATION
    if header.slot_bytes != length:
        return SHORT if length < header.slot_bytes else Mismatch.SLOT_SIZE
    if not header.payload_bytes or header.payload_bytes != length - header_bytes:
        return Mismatch.LENGTH
    return key_fault(header)


def stored_block(found: Found, number: int) -> StoredBlock | None:
    """A block as the tools list it; `number` is its number in the bucket. None if it is none."""
    state, header, _ = found.judged
    if state is None or header is None:
        return None
    return StoredBlock(
        state=state,
        namespace=header.namespace,
        group=header.group,
        key=header.key,
        region=found.place.bucket,
        slot=number,
        generation=header.generation,
        payload_bytes=header.payload_bytes,
        stored_bytes=occupied(found.status),
        stored_at=header.generation / _NANOSECONDS,
        used_at=found.status.st_mtime,
    )

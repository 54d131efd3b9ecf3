"""The content of a block's place in a root of layout `files`: a block, a leftover, damage. Links are never followed."""

import errno
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from kvtier.tier.block_envelope import KEY_AT, MAGIC, Mismatch, decode_slot_header, is_other_version, page_fault
from kvtier.tier.inspection import BlockState
from kvtier_fs.format.tree_records import Tree
from kvtier_fs.inspect.found import SHORT, HeaderVerdict, SlotContent, judge_header, read_fault
from kvtier_fs.roots.folder import plain_file
from kvtier_fs.shared.block_file import MismatchedFile
from kvtier_fs.shared.folder import GONE, vanished
from kvtier_fs.shared.paths import BlockPlace, occupied, place_of

NO_PLAIN_FILE = "file"

EpochOf = Callable[[bytes, int], int | None]
"""The epoch of a namespace that counts, given the one that a block states; None if none does."""


@dataclass(frozen=True, slots=True, eq=False)
class FileContent(SlotContent):
    """A file that has the name of a block. `fd` is -1 where nothing could be opened; `wrong` identifies the file when
    it is removed."""

    place: BlockPlace
    wrong: MismatchedFile


@contextmanager
def opened_file(
    leaf_fd: int, place: BlockPlace, number: int, tree: Tree, epoch_of: EpochOf
) -> Iterator[FileContent | None]:
    """The content of a place, open meanwhile; None if it is gone. Only plain files are opened. `number`: in its bucket.

    Raises OSError.
    """
    with ExitStack() as closing:
        found = None
        with vanished():
            status = os.stat(place.name, dir_fd=leaf_fd, follow_symlinks=False)
            fd, judged, front = -1, HeaderVerdict(fault=NO_PLAIN_FILE), b""
            try:
                if stat.S_ISREG(status.st_mode):
                    fd = closing.enter_context(plain_file(leaf_fd, place.name))
                    status = os.fstat(fd)
                    page = memoryview(os.pread(fd, tree.header_bytes, 0))
                    judged, front = judge_file(page, status.st_size, place, tree, epoch_of), bytes(page[:KEY_AT])
            except OSError as error:
                if error.errno in GONE:
                    raise
                judged = HeaderVerdict(fault=unread_fault(error))
            found = FileContent(
                judged=judged,
                region=place.bucket,
                slot=number,
                stored_bytes=occupied(status),
                fd=fd,
                payload_at=tree.header_bytes,
                used_at=status.st_mtime,
                place=place,
                wrong=MismatchedFile(status.st_ino, front),
            )
        yield found


def unread_fault(error: OSError) -> str:
    """The reason for a file that cannot be read; links are not followed, so a link is no plain file."""
    return NO_PLAIN_FILE if error.errno == errno.ELOOP else read_fault(error)


def judge_file(page: memoryview, length: int, place: BlockPlace, tree: Tree, epoch_of: EpochOf) -> HeaderVerdict:
    """Judge the header page of a file of `length` bytes that lies in a place; the payload is not read.

    A block that another release stored is none of this one's.
    """
    if len(page) < tree.header_bytes:
        return HeaderVerdict(fault=SHORT)
    header = decode_slot_header(page)
    if header is None and is_other_version(page):
        return HeaderVerdict()
    if header is None:
        return HeaderVerdict(fault=page_fault(page) or MAGIC)
    if header.root_uuid != tree.root_uuid:
        return HeaderVerdict(BlockState.FOREIGN, header)
    due = place_of(tree, header.namespace, header.key)
    if due.name != place.name:
        return HeaderVerdict(fault=Mismatch.KEY)
    if due != place:
        return HeaderVerdict(BlockState.ORPHANED, header)
    if length < header.slot_bytes:
        return HeaderVerdict(fault=SHORT)
    expected = header._replace(
        region=place.bucket,
        slot_index=0,
        region_generation=0,
        slot_bytes=length,
        payload_bytes=max(1, length - len(page)),
    )
    return judge_header(header, expected, epoch_of(header.namespace, header.epoch))

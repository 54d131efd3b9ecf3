"""A slab root for `kvtier fsck`, `ls`, `du` and `gc`: every slot read and judged offline, damaged ones made empty."""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import xxhash

from kvtier.errors import RootError
from kvtier.inspection import (
    Access,
    BlockState,
    Checked,
    Finding,
    FindingKind,
    Inspection,
    Listed,
    StoreAbout,
    StoredBlock,
)
from kvtier_fs.inspect_records import check_records, lost_slots
from kvtier_fs.inspect_root import InspectedRoot
from kvtier_fs.inspect_slots import Cut, Judged, Run, judge
from kvtier_fs.slot import SlotHeader
from kvtier_fs.verify import Mismatch

T = TypeVar("T")

UNREADABLE = "unreadable"
SHORT = "truncated"
_THREADS = 4
_RUNS_AHEAD = 2 * _THREADS
_RUN_BYTES = 16 << 20
_PIECE_BYTES = 1 << 20
_KEPT_NOT = "when blocks were stored and how often they were hit is not kept on disk; generations order them"
_UNCLEAN = "the last session did not close in order; a few torn slots are to be expected then"
_NO_LOCK = "there is no lock file, so nobody can tell whether the root is in use"
_KINDS = {
    BlockState.OLD: FindingKind.OLD,
    BlockState.ORPHANED: FindingKind.ORPHANED,
    BlockState.FOREIGN: FindingKind.FOREIGN,
}


def inspect_root(path: str, access: Access) -> Inspection | None:
    """The slab root in a folder; None if it holds none. Raises RootError, having let go of everything."""
    root = InspectedRoot(path, access)
    found = False
    try:
        found = root.open()
    finally:
        if not found:
            root.close()
    return SlabInspection(root) if found else None


class SlabInspection:
    """One slab root under inspection. Slots are read by a few threads, results come in the order of places."""

    def __init__(self, root: InspectedRoot) -> None:
        self._root = root
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="kvtier-fs-inspect")
        plan, block = root.plan, root.superblock
        notes = [_KEPT_NOT]
        if not block.clean and not root.owner:
            notes.append(_UNCLEAN)
        if not root.has_lock:
            notes.append(_NO_LOCK)
        self.about = StoreAbout(
            root=root.path,
            layout="slab",
            identity=block.root_uuid.hex(),
            slots=sum(plan.slots(cut.slot_bytes) for cut in root.cuts),
            regions=plan.regions,
            region_bytes=plan.stride,
            session=block.session,
            clean=block.clean,
            owner=root.owner,
            namespaces=root.namespaces(),
            notes=tuple(notes),
        )

    def close(self) -> None:
        """End the reads under way and let go of the root. Idempotent."""
        self._threads.shutdown(cancel_futures=True)
        self._root.close()

    def blocks(self) -> Iterator[Listed]:
        """Every block that has a whole header, in the order of their places. Payloads are not read."""
        return self._in_order(self._list)

    def check(self, repair: bool) -> Iterator[Checked]:
        """Verify the root's own records, then every slot with its payload; repair zeroes headers of damaged slots."""
        self._root.read_snapshot()
        for finding in check_records(self._root, repair):
            yield Checked(findings=(finding,))
        yield from self._in_order(lambda run: self._check(run, repair))
        if repair:
            self._root.sync()

    def drop(self, chosen: Callable[[StoredBlock], bool]) -> Iterator[Listed]:
        """Zero the headers of chosen blocks, yielding these; a namespace that has none left loses its manifest.

        Raises RootError if the disk does not take it; what was dropped until then stays dropped.
        """
        dropped: set[bytes] = set()
        kept: set[bytes] = set()
        zeros = bytes(self._root.plan.header_bytes)
        cuts = {cut.region: cut for cut in self._root.cuts}
        for listed in self.blocks():
            going = []
            for block in listed.blocks:
                if not chosen(block):
                    kept.add(block.namespace)
                    continue
                if not self._root.write(*self._root.place(cuts[block.region], block.slot), zeros):
                    raise RootError(self._root.path, f"region {block.region}, slot {block.slot} cannot be written")
                dropped.add(block.namespace)
                going.append(block)
            yield Listed(listed.slots, going)
        self._root.sync()
        for namespace in dropped - kept:
            self._root.remove_manifest(namespace)

    def _in_order(self, work: Callable[[Run], T]) -> Iterator[T]:
        """Do something with every run of slots, a few at once; results in the order of their places."""
        waiting: deque[Future[T]] = deque()
        for run in self._runs(list(self._root.cuts)):
            waiting.append(self._threads.submit(work, run))
            if len(waiting) >= _RUNS_AHEAD:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()

    def _runs(self, cuts: Iterable[Cut]) -> Iterator[Run]:
        for cut in cuts:
            slots, step = self._root.plan.slots(cut.slot_bytes), max(1, _RUN_BYTES // cut.slot_bytes)
            for first in range(0, slots, step):
                yield Run(cut, first, min(step, slots - first))

    def _judged(self, run: Run) -> Iterator[tuple[int, Judged]]:
        """Every slot of a run that holds something."""
        header_bytes = self._root.plan.header_bytes
        zeros = bytes(header_bytes)
        page = memoryview(bytearray(header_bytes))
        for index in range(run.first, run.first + run.slots):
            fd, offset = self._root.place(run.cut, index)
            try:
                length = os.preadv(fd, [page], offset)
            except OSError as error:
                yield index, Judged(fault=_read_fault(error))
                continue
            if length == header_bytes and page != zeros:
                yield index, judge(page, index, run.cut, self._root.superblock)

    def _list(self, run: Run) -> Listed:
        blocks = []
        for index, (state, header, _) in self._judged(run):
            if state is not None and header is not None:
                blocks.append(_block(state, header, run.cut, index))
        return Listed(run.slots, blocks)

    def _check(self, run: Run, repair: bool) -> Checked:
        findings, whole, payload_bytes = [], dict[int, bytes](), 0
        for index, judged in self._judged(run):
            where = f"slab-{self._root.plan.file_of(run.cut.region):05d}, region {run.cut.region}, slot {index}"
            fault = judged.fault
            if judged.state is BlockState.CURRENT and judged.header is not None:
                fault = self._payload_fault(run.cut, index, judged.header)
                if not fault:
                    whole[index] = judged.header.key
                    payload_bytes += judged.header.payload_bytes
                    continue
            if fault:
                repaired = repair and self._empty(run.cut, index)
                findings.append(Finding(FindingKind.CORRUPT, fault, where, repaired))
            elif judged.state is not None:
                findings.append(Finding(_KINDS[judged.state], judged.state.value, where))
        empty = run.slots - len(whole) - len(findings)
        corrupt = {finding.where for finding in findings if finding.kind is FindingKind.CORRUPT}
        lost = [finding for finding in lost_slots(self._root, run, whole, repair) if finding.where not in corrupt]
        return Checked(run.slots, empty, len(whole), payload_bytes, findings + lost)

    def _empty(self, cut: Cut, index: int) -> bool:
        return self._root.write(*self._root.place(cut, index), bytes(self._root.plan.header_bytes))

    def _payload_fault(self, cut: Cut, index: int, header: SlotHeader) -> str:
        """What is wrong with a payload; empty if it is what was stored. Read in pieces, whatever its size."""
        fd, offset = self._root.place(cut, index)
        offset += self._root.plan.header_bytes
        piece = memoryview(bytearray(min(_PIECE_BYTES, header.payload_bytes)))
        digest, left = xxhash.xxh3_128(), header.payload_bytes
        while left:
            try:
                length = os.preadv(fd, [piece[:left]], offset)
            except OSError as error:
                return _read_fault(error)
            if not length:
                return SHORT
            digest.update(piece[:length])
            offset, left = offset + length, left - length
        return "" if digest.digest() == header.payload_digest else Mismatch.PAYLOAD


def _read_fault(error: OSError) -> str:
    return f"{UNREADABLE}_{errno.errorcode.get(error.errno or 0, 'unknown')}"


def _block(state: BlockState, header: SlotHeader, cut: Cut, index: int) -> StoredBlock:
    return StoredBlock(
        state=state,
        namespace=header.namespace,
        group=header.group,
        key=header.key,
        region=cut.region,
        slot=index,
        generation=header.generation,
        payload_bytes=header.payload_bytes,
        stored_bytes=cut.slot_bytes,
    )

"""A root for `kvtier fsck`, `ls`, `du` and `gc`. Here layout slab: every slot judged offline, damaged ones emptied."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator

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
from kvtier_fs.inspect_files import inspect_files
from kvtier_fs.inspect_files_root import is_files_root
from kvtier_fs.inspect_reading import LEFTOVERS, Readers, payload_fault, read_fault
from kvtier_fs.inspect_records import check_records, lost_slots
from kvtier_fs.inspect_root import InspectedRoot
from kvtier_fs.inspect_slots import Cut, Judged, Run, judge
from kvtier_fs.slot import SlotHeader

_RUN_BYTES = 16 << 20
_KEPT_NOT = "when blocks were stored and how often they were hit is not kept on disk; generations order them"
_UNCLEAN = "the last session did not close in order; a few torn slots are to be expected then"
_NO_LOCK = "there is no lock file, so nobody can tell whether the root is in use"


def inspect_root(path: str, access: Access) -> Inspection | None:
    """The root in a folder, of either layout; None if it holds none. Raises RootError, having let go of everything."""
    return inspect_files(path, access) if is_files_root(path) else _inspect_slab(path, access)


def _inspect_slab(path: str, access: Access) -> Inspection | None:
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
        self._readers = Readers()
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
        self._readers.close()
        self._root.close()

    def blocks(self) -> Iterator[Listed]:
        """Every block that has a whole header, in the order of their places. Payloads are not read."""
        return self._readers.in_order(self._list, self._runs(list(self._root.cuts)))

    def check(self, repair: bool) -> Iterator[Checked]:
        """Verify the root's own records, then every slot with its payload; repair zeroes headers of damaged slots."""
        self._root.read_snapshot()
        for finding in check_records(self._root, repair):
            yield Checked(findings=(finding,))
        yield from self._readers.in_order(lambda run: self._check(run, repair), self._runs(list(self._root.cuts)))
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
                yield index, Judged(fault=read_fault(error))
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
                fd, offset = self._root.place(run.cut, index)
                fault = payload_fault(fd, offset + self._root.plan.header_bytes, judged.header)
                if not fault:
                    whole[index] = judged.header.key
                    payload_bytes += judged.header.payload_bytes
                    continue
            if fault:
                repaired = repair and self._empty(run.cut, index)
                findings.append(Finding(FindingKind.CORRUPT, fault, where, repaired))
            elif judged.state is not None:
                findings.append(Finding(LEFTOVERS[judged.state], judged.state.value, where))
        empty = run.slots - len(whole) - len(findings)
        corrupt = {finding.where for finding in findings if finding.kind is FindingKind.CORRUPT}
        lost = [finding for finding in lost_slots(self._root, run, whole, repair) if finding.where not in corrupt]
        return Checked(run.slots, empty, len(whole), payload_bytes, findings + lost)

    def _empty(self, cut: Cut, index: int) -> bool:
        return self._root.write(*self._root.place(cut, index), bytes(self._root.plan.header_bytes))


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

"""A slab root for `kvtier fsck`, `ls`, `du` and `gc`: every slot judged, damaged ones emptied."""

import os
import time
from collections.abc import Iterable, Iterator

from kvtier.errors import RootError
from kvtier.tier.inspection import Access, Finding, FindingKind
from kvtier_fs.inspect.found import HeaderVerdict, SlotContent, read_fault
from kvtier_fs.inspect.local_records import check_records, lost_slots
from kvtier_fs.inspect.local_root import InspectedRoot
from kvtier_fs.inspect.local_slots import SlotRun, judge
from kvtier_fs.inspect.store import CheckedRun

_SECOND_LOOK_SECONDS = 2.0
"""How long what looks damaged beside an owner is left alone before it is read once more."""
_CHANGING = "being_written"


class LocalInspection(InspectedRoot):
    """One slab root under inspection, with its blocks. A block is removed by zeroing its header.

    With READ access a tier may own the root and write meanwhile. Damage is then what looks the same twice.
    """

    def _found(self, run: SlotRun) -> Iterator[SlotContent]:
        fmt, header_bytes = run.fmt, self.plan.header_bytes
        zeros = bytes(header_bytes)
        page = memoryview(bytearray(header_bytes))
        for index in range(run.first, run.first + run.slots):
            fd, offset = self.place(fmt, index)
            try:
                length = os.preadv(fd, [page], offset)
            except OSError as error:
                judged = HeaderVerdict(fault=read_fault(error))
            else:
                if length != header_bytes or page == zeros:
                    continue
                judged = judge(page, index, fmt, self.superblock)
            yield SlotContent(judged, fmt.region, index, fmt.slot_bytes, fd, offset + header_bytes, None)

    def _verify(self, run: SlotRun) -> CheckedRun[SlotContent, SlotRun]:
        checked = self._twice(super()._verify(run))
        fd, begin = self.place(run.fmt, run.first)
        # Not kept in memory: it would push out what is in use, and the next check would not read the disk.
        os.posix_fadvise(fd, begin, run.slots * run.fmt.slot_bytes, os.POSIX_FADV_DONTNEED)
        return checked

    def _twice(self, checked: CheckedRun[SlotContent, SlotRun]) -> CheckedRun[SlotContent, SlotRun]:
        """What looks damaged is read once more if a tier may be writing it: it is damaged if it looks the same."""
        first = {one.slot: (one.judged, fault) for one, fault in checked.others if fault}
        if not first or self.access is not Access.READ:
            return checked
        time.sleep(_SECOND_LOOK_SECONDS)
        self.read_superblock()  # a reset raises an epoch
        if self.format_now(checked.run.fmt.region) != checked.run.fmt:
            return checked._replace(others=[(one, fault and _CHANGING) for one, fault in checked.others])
        again = super()._verify(checked.run)
        return again._replace(
            others=[
                (one, fault if not fault or first.get(one.slot) == (one.judged, fault) else _CHANGING)
                for one, fault in again.others
            ]
        )

    def _finding(self, one: SlotContent, fault: str, repaired: bool) -> Finding:
        if fault == _CHANGING:
            return Finding(FindingKind.UNCHECKED, fault, self._place_in_words(one))
        return super()._finding(one, fault, repaired)

    def _place_in_words(self, one: SlotContent) -> str:
        return f"{self.where(one.region)}, slot {one.slot}"

    def _remove(self, part: int, found: list[SlotContent], must: bool) -> set[SlotContent]:
        header_bytes, gone = self.plan.header_bytes, set()
        for one in found:
            if self.write(one.fd, one.payload_at - header_bytes, bytes(header_bytes)):
                gone.add(one)
            elif must:
                raise RootError(self.path, f"region {one.region}, slot {one.slot} cannot be written")
        return gone

    def _check_records(self, repair: bool) -> Iterator[Finding]:
        if self.access is Access.READ and (self.bad_regions or not self.copies_agree):
            time.sleep(_SECOND_LOOK_SECONDS)
            self.read_superblock()
            self.read_regions()
        self.read_snapshot()
        yield from check_records(self, repair)

    def _lost(self, checked: CheckedRun[SlotContent, SlotRun], repair: bool) -> Iterable[Finding]:
        corrupt = {one.slot for one, fault in checked.others if fault}
        return lost_slots(self, checked.run, checked.whole, corrupt, repair)

    def _end_check(self, repair: bool) -> Iterable[Finding]:
        self.sync()
        return ()

    def _end_drop(self, part: int, removed: int) -> None:
        self.sync()

"""A slab root for `kvtier fsck`, `ls`, `du` and `gc`: every slot judged offline, damaged ones emptied."""

import os
from collections.abc import Iterable, Iterator

from kvtier.errors import RootError
from kvtier.tier_api.inspection import Finding
from kvtier_fs.inspect.found import Found, Judged, read_fault
from kvtier_fs.inspect.slab_records import check_records, lost_slots
from kvtier_fs.inspect.slab_root import InspectedRoot
from kvtier_fs.inspect.slab_slots import SlotRun, judge
from kvtier_fs.inspect.store import Checked


class SlabInspection(InspectedRoot):
    """One slab root under inspection, with its blocks. A block is removed by zeroing its header."""

    def _found(self, run: SlotRun) -> Iterator[Found]:
        fmt, header_bytes = run.fmt, self.plan.header_bytes
        zeros = bytes(header_bytes)
        page = memoryview(bytearray(header_bytes))
        for index in range(run.first, run.first + run.slots):
            fd, offset = self.place(fmt, index)
            try:
                length = os.preadv(fd, [page], offset)
            except OSError as error:
                judged = Judged(fault=read_fault(error))
            else:
                if length != header_bytes or page == zeros:
                    continue
                judged = judge(page, index, fmt, self.superblock)
            yield Found(judged, fmt.region, index, fmt.slot_bytes, fd, offset + header_bytes, None)

    def _place_in_words(self, one: Found) -> str:
        return f"{self.where(one.region)}, slot {one.slot}"

    def _remove(self, part: int, found: list[Found], must: bool) -> set[Found]:
        header_bytes, gone = self.plan.header_bytes, set()
        for one in found:
            if self.write(one.fd, one.payload_at - header_bytes, bytes(header_bytes)):
                gone.add(one)
            elif must:
                raise RootError(self.path, f"region {one.region}, slot {one.slot} cannot be written")
        return gone

    def _check_records(self, repair: bool) -> Iterator[Finding]:
        self.read_snapshot()
        yield from check_records(self, repair)

    def _lost(self, checked: Checked[Found, SlotRun], repair: bool) -> Iterable[Finding]:
        corrupt = {one.slot for one, fault in checked.others if fault}
        return lost_slots(self, checked.run, checked.whole, corrupt, repair)

    def _end_check(self, repair: bool) -> Iterable[Finding]:
        self.sync()
        return ()

    def _end_drop(self, part: int, removed: int) -> None:
        self.sync()

"""Protections of the production code and how to turn each of them off, and the promise that is broken then.

Each switch belongs to the test build alone: the suite proves itself by what it finds without the protection.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

import pytest

from kvtier.checksum import checksum
from kvtier.control import promotion
from kvtier.jobs import BlockOutcome
from kvtier.testing.world.disk import DiskFile
from kvtier_fs import ledger, scan, slot, transfer, verify
from kvtier_fs.files import blockfile, blocks, epochs, moving, pruning


def _verify_without(monkeypatch: pytest.MonkeyPatch, *fields: str) -> None:
    """Loads take these fields as the header states them."""
    verified = verify.verify_block

    def verify_block(
        page: memoryview, payload: memoryview, fixed: bytes, key: bytes, keep_gil: bool = False
    ) -> verify.Mismatch | bytes:
        found = slot.decode_slot_header(page)
        if found is None:
            return verified(page, payload, fixed, key, keep_gil)
        wanted = slot.unpack_fixed(fixed, key)._replace(**{field: getattr(found, field) for field in fields})
        return verified(page, payload, slot.pack_fixed(wanted, len(page)), wanted.key, keep_gil)

    monkeypatch.setattr(verify, "verify_block", verify_block)


def without_checksum(monkeypatch: pytest.MonkeyPatch) -> None:
    """The payload is what it is."""
    verified = verify.verify_block

    def verify_block(
        page: memoryview, payload: memoryview, fixed: bytes, key: bytes, keep_gil: bool = False
    ) -> verify.Mismatch | bytes:
        found = verified(page, payload, fixed, key, keep_gil)
        return checksum(payload) if found is verify.Mismatch.PAYLOAD else found

    monkeypatch.setattr(verify, "verify_block", verify_block)


def without_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose block a slot holds does not matter. Its generation guards the same mistake, so it does not count either."""
    _verify_without(monkeypatch, "key", "generation")


def without_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a slot says it is does not matter. Key and generation guard the same mistake and do not count either."""
    _verify_without(monkeypatch, "root_uuid", "region", "region_generation", "slot_index", "key", "generation")


def without_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks from before a reset count as well, when a root is opened and when a block is loaded."""
    _verify_without(monkeypatch, "epoch")
    counts = scan.Wanted.counts

    def counts_in_any_epoch(self: scan.Wanted, header: slot.SlotHeader) -> bool:
        return counts(self, header._replace(epoch=self.epoch))

    def number_of(self: ledger.Ledger, namespace: bytes, epoch: int) -> int:
        return self._numbers.get(namespace, ledger.NOBODY)

    monkeypatch.setattr(scan.Wanted, "counts", counts_in_any_epoch)
    monkeypatch.setattr(ledger.Ledger, "number_of", number_of)


def without_quarantine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of a late load are free at once, although its I/O goes on."""
    late = promotion.PromotionJob.late

    def free_at_once(self: promotion.PromotionJob, now: float) -> None:
        late(self, now)
        self.board.cpu.release(self.rows)

    def ended(self: promotion.PromotionJob, now: float) -> None:
        self.lower.rows_stuck -= len(self.rows)
        self.lower.rows_held -= len(self.rows)
        if self.lower.owned is not None:
            self.lower.owned.release(self.slots)

    monkeypatch.setattr(promotion.PromotionJob, "late", free_at_once)
    monkeypatch.setattr(promotion.PromotionJob, "ended", ended)


def without_short_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """A transfer that moved less than it was to counts as whole."""
    piece_done = transfer.Lane._piece_done

    def whatever_moved(self: transfer.Lane, piece: transfer.IORequest, result: int) -> None:
        piece_done(self, piece, piece.length if 0 <= result < piece.length else result)

    monkeypatch.setattr(transfer.Lane, "_piece_done", whatever_moved)


def without_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the first flush of a file makes it durable; what is changed in place later may be lost with the power."""
    flush, flushed = DiskFile.flush, set[DiskFile]()

    def flush_once(self: DiskFile) -> None:
        if self not in flushed:
            flushed.add(self)
            flush(self)

    monkeypatch.setattr(DiskFile, "flush", flush_once)


def without_epoch_of_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files from before a reset count as well."""
    _verify_without(monkeypatch, "epoch")

    async def on_disk(self: epochs.Epoch, epoch: int, storing: bool) -> int:
        return epoch

    def look(self: pruning.Presence, wanted: Sequence[blockfile.Wanted | None], epoch: int) -> list[bool]:
        return [one is not None and self._present(replace(one, header=in_any_epoch(self, one))) for one in wanted]

    def in_any_epoch(self: pruning.Presence, wanted: blockfile.Wanted) -> slot.SlotHeader:
        with suppress(OSError), self._folder.leaf(wanted.place.bucket, wanted.place.leaf) as leaf:
            there = blockfile.header_now(leaf, wanted)
            if isinstance(there, slot.SlotHeader):
                return wanted.header._replace(epoch=there.epoch)
        return wanted.header

    monkeypatch.setattr(epochs.Epoch, "on_disk", on_disk)
    monkeypatch.setattr(pruning.Presence, "look", look)


def without_short_check_of_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """A transfer that moved less than it was to counts as whole."""
    part_done = moving._Transfer.part_done

    def whatever_moved(self: moving._Transfer, request: transfer.IORequest, result: int) -> None:
        part_done(self, request, request.length if 0 <= result < request.length else result)

    monkeypatch.setattr(moving._Transfer, "part_done", whatever_moved)


def without_waiting_for_io(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that is late or cancelled gives its rows back although their I/O goes on."""

    def give_up_at_once(self: blocks.Block, outcome: BlockOutcome) -> None:
        self.let_down = True
        self.end(outcome)

    monkeypatch.setattr(blocks.Block, "give_up", give_up_at_once)


WRONG_BYTES = "was loaded with"

SWITCHES: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str, str]] = {
    "checksum": (without_checksum, WRONG_BYTES, "slab"),
    "key compare": (without_key, WRONG_BYTES, "slab"),
    "place compare": (without_place, f"was loaded from another place|{WRONG_BYTES}", "slab"),
    "epoch": (without_epoch, f"not stored since the reset|{WRONG_BYTES}", "slab"),
    "quarantine": (without_quarantine, "wrote into row|is filled by two jobs", "slab"),
    "short-read check": (without_short_check, "with .* of .* bytes", "slab"),
    "flush": (without_flush, f"not stored since the reset|{WRONG_BYTES}", "slab"),
    "checksum (files)": (without_checksum, WRONG_BYTES, "files"),
    "key compare (files)": (without_key, f"was loaded from another place|{WRONG_BYTES}", "files"),
    "epoch (files)": (without_epoch_of_files, f"not stored since the reset|{WRONG_BYTES}", "files"),
    "short-read check (files)": (without_short_check_of_files, "with .* of .* bytes", "files"),
    "waiting for I/O (files)": (without_waiting_for_io, "wrote into row|is filled by two jobs|read row", "files"),
}
"""Name of a protection: how to turn it off, what the simulator says then (a regular expression), over which layout."""

RARE = ("flush", "waiting for I/O (files)")
"""What takes hundreds of seeds to be noticed."""

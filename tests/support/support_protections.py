"""Protections of the production code and how to turn each of them off, and the promise that is broken then.

Each switch belongs to the test build alone: the suite proves itself by what it finds without the protection.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

import pytest

from kvtier.control.flow import promotions
from kvtier.control.tiers.aged_tier import AgedTier
from kvtier.tier import block_envelope
from kvtier.tier.block_age import AgeLimit
from kvtier.tier.checksum import checksum
from kvtier.types.arrays import NO_IDS
from kvtier.types.jobs import BlockOutcome
from kvtier_fs.format import slot_map
from kvtier_fs.io import full_transfer
from kvtier_fs.io.contract import IORequest
from kvtier_fs.local import layout
from kvtier_fs.shared import block_file, block_steps
from kvtier_fs.shared import tier as shared_tier
from kvtier_remote import value
from kvtier_remote.names import BlockNames
from kvtier_remote.transport import Marker
from kvtier_remote.valkey import calls as valkey_calls
from kvtier_remote.valkey import transport as valkey_transport
from simulator.disk import DiskFile


def _verify_without(monkeypatch: pytest.MonkeyPatch, *fields: str) -> None:
    """Loads take these fields as the header states them."""
    verified = block_envelope.verify_block

    def verify_block(
        page: memoryview, payload: memoryview, fixed: bytes, key: bytes, keep_gil: bool = False
    ) -> block_envelope.Mismatch | bytes:
        found = block_envelope.decode_slot_header(page)
        if found is None:
            return verified(page, payload, fixed, key, keep_gil)
        wanted = block_envelope.unpack_fixed(fixed, key)._replace(**{field: getattr(found, field) for field in fields})
        return verified(page, payload, block_envelope.pack_fixed(wanted, len(page)), wanted.key, keep_gil)

    for module in (block_envelope, value):
        monkeypatch.setattr(module, "verify_block", verify_block)


def without_checksum(monkeypatch: pytest.MonkeyPatch) -> None:
    """The payload is what it is."""
    verified = block_envelope.verify_block

    def verify_block(
        page: memoryview, payload: memoryview, fixed: bytes, key: bytes, keep_gil: bool = False
    ) -> block_envelope.Mismatch | bytes:
        found = verified(page, payload, fixed, key, keep_gil)
        return checksum(payload) if found is block_envelope.Mismatch.PAYLOAD else found

    for module in (block_envelope, value):
        monkeypatch.setattr(module, "verify_block", verify_block)


def without_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose block a slot holds does not matter. Its generation guards the same mistake, so it does not count either."""
    _verify_without(monkeypatch, "key", "generation")


def without_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a slot says it is does not matter. Key and generation guard the same mistake and do not count either."""
    _verify_without(monkeypatch, "root_uuid", "region", "region_generation", "slot_index", "key", "generation")


def without_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks from before a reset count as well, when a root is opened and when a block is loaded."""
    _verify_without(monkeypatch, "epoch")
    counts = layout.RootSession.counts

    def counts_in_any_epoch(self: layout.RootSession, header: block_envelope.SlotHeader) -> bool:
        return counts(self, header._replace(epoch=self.epoch))

    def number_of(self: slot_map.SlotMap, namespace: bytes, epoch: int) -> int:
        return self._numbers.get(namespace, slot_map.NO_OWNER)

    monkeypatch.setattr(layout.RootSession, "counts", counts_in_any_epoch)
    monkeypatch.setattr(slot_map.SlotMap, "number_of", number_of)


def without_quarantine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of a late load are free at once, although its I/O goes on."""
    late = promotions.PromotionJob.on_late

    def free_at_once(self: promotions.PromotionJob, now: float) -> None:
        late(self, now)
        self.control.cpu.unpin(self.rows)

    def ended(self: promotions.PromotionJob, now: float) -> None:
        self.lower.rows_late -= len(self.rows)
        self.lower.rows_in_flight -= len(self.rows)
        if self.lower.owned is not None:
            self.lower.owned.unpin(self.slots)

    monkeypatch.setattr(promotions.PromotionJob, "on_late", free_at_once)
    monkeypatch.setattr(promotions.PromotionJob, "on_end", ended)


def without_short_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """A transfer that moved less than it was to counts as whole."""
    shortfall = full_transfer.FullTransferIO.shortfall

    def whatever_moved(self: full_transfer.FullTransferIO, request: IORequest, result: int) -> int | None:
        return shortfall(self, request, request.length if 0 <= result < request.length else result)

    monkeypatch.setattr(full_transfer.FullTransferIO, "shortfall", whatever_moved)


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

    async def read_epoch(self: shared_tier.FolderEpoch, epoch: int, storing: bool) -> int:
        return epoch

    def look(self: block_file.Presence, wanted: Sequence[block_file.ExpectedBlock | None], epoch: int) -> list[bool]:
        return [one is not None and self._present(replace(one, header=in_any_epoch(self, one))) for one in wanted]

    def in_any_epoch(self: block_file.Presence, wanted: block_file.ExpectedBlock) -> block_envelope.SlotHeader:
        with suppress(OSError), self._folder.leaf(wanted.place.bucket, wanted.place.leaf) as leaf:
            there = block_file.header_now(leaf, wanted)
            if isinstance(there, block_envelope.SlotHeader):
                return wanted.header._replace(epoch=there.epoch)
        return wanted.header

    monkeypatch.setattr(shared_tier.FolderEpoch, "read_epoch", read_epoch)
    monkeypatch.setattr(block_file.Presence, "probe", look)


def without_waiting_for_io(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that is late or cancelled gives its rows back although their I/O goes on."""

    def give_up_at_once(self: block_steps.Block, outcome: BlockOutcome) -> None:
        self.abandoned = True
        self.end(outcome)

    monkeypatch.setattr(block_steps.Block, "give_up", give_up_at_once)


def without_age(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block of any age will do: at opening, at a lookup, at a load."""
    monkeypatch.setattr(AgeLimit, "allows", lambda self, generation: True)
    monkeypatch.setattr(slot_map.RegionSlots, "numbers_within", lambda self, owner, limit: self.numbers_of(owner))


def without_reclaiming(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that is too old keeps its slot until one asks for it or evicts it."""
    monkeypatch.setattr(AgedTier, "_too_old", lambda self: NO_IDS)


WRONG_BYTES = "was loaded with"

_ELSEWHERE = "was loaded from another place"
"""Also what a misplaced read says that finds a file of the same block from before the reset, replaced meanwhile: only
the epoch in its header tells it apart."""

SWITCHES: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str, str]] = {
    "checksum": (without_checksum, WRONG_BYTES, "slab"),
    "key compare": (without_key, WRONG_BYTES, "slab"),
    "place compare": (without_place, f"{_ELSEWHERE}|{WRONG_BYTES}", "slab"),
    "epoch": (without_epoch, f"not stored since the reset|{WRONG_BYTES}", "slab"),
    "quarantine": (without_quarantine, "wrote into row|is filled by two jobs", "slab"),
    "short-read check": (without_short_check, "with .* of .* bytes", "slab"),
    "flush": (without_flush, f"not stored since the reset|{WRONG_BYTES}", "slab"),
    "age": (without_age, "s after it was stored|every copy of it is too old|was to be reclaimed", "slab"),
    "reclaiming": (without_reclaiming, "was to be reclaimed", "slab"),
    "checksum (files)": (without_checksum, WRONG_BYTES, "files"),
    "key compare (files)": (without_key, f"{_ELSEWHERE}|{WRONG_BYTES}", "files"),
    "epoch (files)": (without_epoch_of_files, f"not stored since the reset|{_ELSEWHERE}|{WRONG_BYTES}", "files"),
    "short-read check (files)": (without_short_check, "with .* of .* bytes", "files"),
    "waiting for I/O (files)": (without_waiting_for_io, "wrote into row|is filled by two jobs|read row", "files"),
}
"""Name of a protection: how to turn it off, what the simulator says then (a regular expression), over which layout."""

RARE = ("flush", "waiting for I/O (files)")
"""What takes hundreds of seeds to be noticed."""

RED_SEEDS: dict[str, tuple[int, ...]] = {
    "checksum": (240, 32, 74),
    "key compare": (71, 268, 170),
    "place compare": (71, 47, 60),
    "epoch": (79, 87, 35),
    "quarantine": (313, 93, 291),
    "short-read check": (23, 9, 39),
    "age": (5, 27, 14),
    "reclaiming": (27, 32, 14),
    "checksum (files)": (179, 306, 115),
    "key compare (files)": (97, 17, 113),
    "epoch (files)": (47, 10, 35),
    "short-read check (files)": (49, 4, 34),
}
"""Seeds that were red without a protection, each within a tenth of a second. A change of what the simulator draws may
make them green; then a run that begins with them goes on with random ones and takes longer."""


# ---- values on a server


def without_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which namespace, epoch and incarnation a value is does not matter."""
    _verify_without(monkeypatch, "namespace", "epoch", "root_uuid", "generation")


def without_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """A value of any length will do. The checksum guards the same mistake, so it does not count either."""

    class Whatever(list[int]):
        def __eq__(self, other: object) -> bool:
            return True

        def __ne__(self, other: object) -> bool:
            return False

        __hash__ = None  # type: ignore[assignment]

    for module in (valkey_transport, valkey_calls):
        monkeypatch.setattr(module, "sizes_of", lambda parts: Whatever())
    without_checksum(monkeypatch)


def without_epochs_in_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """All epochs of a namespace share their names. The headers guard the same mistake and do not count either."""
    namer = BlockNames.namer
    monkeypatch.setattr(BlockNames, "namer", lambda self, marker: namer(self, Marker(bytes(8), 0)))
    without_identity(monkeypatch)


REMOTE_SWITCHES: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str, int]] = {
    "checksum": (without_checksum, "values", 22),
    "key compare": (without_key, "values", 22),
    "identity compare": (without_identity, "values", 22),
    "length check": (without_lengths, "values", 22),
    "epochs in names": (without_epochs_in_names, "hosts", 5),
}
"""Name of a protection of values on a server: how to turn it off, the attack that notices, and in how many rounds."""

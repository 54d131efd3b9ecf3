"""The protections of epochs that stores share, and how to turn each of them off, as in `support_protections`."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvtier.stack import joining
from kvtier.tier import shared_epoch
from kvtier_fs.format import superblock, tree_records
from kvtier_fs.local import opening
from kvtier_fs.shared import tier as shared_tier
from kvtier_remote.transport import Marker
from kvtier_remote.valkey import transport as valkey_transport


def without_numbers_of_openings(monkeypatch: pytest.MonkeyPatch) -> None:
    """An opening that has to move a store on takes the next number, as a reset does."""

    def fresh_epoch(above: int = 0) -> int:
        return above + 1

    def choose_epoch(stated: Sequence[int], on_disks: int) -> int:
        return max(*stated, on_disks)

    for module in (joining, shared_tier, shared_epoch, opening):
        monkeypatch.setattr(module, "fresh_epoch", fresh_epoch)
    monkeypatch.setattr(joining, "choose_epoch", choose_epoch)
    monkeypatch.setattr(shared_epoch, "line_of", lambda epoch: 0)


def without_own_bytes_of_resets(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reset counts in the incarnation that is there, and takes whatever has its number for the same count."""

    def following(self: shared_epoch.SharedEpoch, held: Marker | None, epoch: int) -> Marker:
        return Marker(self._incarnation, epoch) if held is None else held._replace(epoch=max(held.epoch + 1, epoch))

    def is_next(self: shared_epoch.SharedEpoch, held: Marker, epoch: int) -> bool:
        return held.epoch == epoch

    monkeypatch.setattr(shared_epoch.SharedEpoch, "_following", following)
    monkeypatch.setattr(shared_epoch.SharedEpoch, "_is_next", is_next)


def without_forgetting_of_lost_markers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A marker that is gone is written again at the number that this process has come to, and a new one begins at 0."""

    def following(self: shared_epoch.SharedEpoch, held: Marker | None, epoch: int) -> Marker:
        return followed(self, held, epoch) if held is not None else self.marker(epoch)

    followed = shared_epoch.SharedEpoch._following
    monkeypatch.setattr(shared_epoch.SharedEpoch, "_following", following)
    monkeypatch.setattr(joining, "fresh_epoch", lambda above=0: above)


def without_ceiling(monkeypatch: pytest.MonkeyPatch) -> None:
    """What states an epoch is one, however large, and a superblock is written whatever it states."""
    for module in (shared_epoch, tree_records, valkey_transport):
        monkeypatch.setattr(module, "EPOCH_CEILING", 1 << 64)
    for module in (joining, shared_epoch, opening, superblock):
        monkeypatch.setattr(module, "is_usable", lambda epoch: True, raising=False)
    monkeypatch.setattr(superblock.Superblock, "possible", property(lambda self: True))
    monkeypatch.setattr(superblock, "_decode_copy", _decode_possible_copy)


_decode_copy = superblock._decode_copy
_possible = superblock.Superblock.possible


def _decode_possible_copy(page: bytes) -> superblock.Superblock | None:
    found = _decode_copy(page)
    return found if found is not None and _possible.fget(found) else None  # type: ignore[attr-defined]

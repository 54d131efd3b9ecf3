"""The epoch of a tier's namespace on a server that many processes use."""

from __future__ import annotations

import errno
import secrets
from collections import Counter

from kvtier.errors import ResourceError
from kvtier.tier.shared_epoch import EPOCH_CEILING, SharedEpoch, fresh_epoch, is_usable, line_of
from kvtier.types.jobs import BlockOutcome, failed
from kvtier_remote.transport import LINEAGE_BYTES, Marker, Transport

INCARNATION_BYTES = 8
_ATTEMPTS = 10


class Epochs(SharedEpoch):
    """The marker of one namespace, and its epoch in this process.

    No block is stored under an epoch that the server's marker has not reached.

    An incarnation is a lineage and a few random bytes. The first process that resets chooses these bytes anew, so
    nothing under its new marker is older than its reset, whatever the server had forgotten or was made to say. Those
    that have counted as far from the same marker take its bytes over and share. Of any other marker it is not known
    whose weights it means. A process that finds one goes on alone, and replaces it by another lineage with a number
    that no count meets, so that a process that opens later finds nothing from before the reset.
    """

    def __init__(self, transport: Transport, name: str, counters: Counter[str]) -> None:
        super().__init__()
        self._transport = transport
        self._name = name
        self._counters = counters
        self._incarnation = secrets.token_bytes(INCARNATION_BYTES)
        self._alone = secrets.token_bytes(INCARNATION_BYTES)
        self._held: Marker | None = None
        self._made: Marker | None = None

    def marker(self, epoch: int) -> Marker:
        """The marker in the names of blocks of an epoch."""
        return Marker(self._alone if self.has_left else self._incarnation, epoch)

    async def refusal(self, epoch: int) -> BlockOutcome | None:
        """Why nothing can be stored under an epoch now: its marker could not be raised. None if it has been.

        Other tiers of a stack may be ahead of this one's marker; their epoch is the stack's, and holds here too.
        """
        self.now = max(self.now, epoch)
        try:
            await self._raise(epoch)
        except OSError as error:
            self._counters["reset.failed"] += 1
            return failed(error.errno or 0)
        return None

    def _failure(self, error: OSError) -> ResourceError:
        self._counters["reset.failed"] += 1
        return ResourceError(f"the epoch cannot be raised on the server ({error.strerror})")

    # -- opening ---------------------------------------------------------------------------------------------------

    async def _begin(self, new_epoch: int) -> int:
        stated = await self._state(new_epoch)
        if not is_usable(stated):
            stated = await self._state(new_epoch)
        if not is_usable(stated):
            raise OSError(errno.EBADMSG, "the marker states no epoch that can be counted from")
        return stated

    def _is_new(self) -> bool:
        return self._held == self._made

    async def _state(self, epoch: int) -> int:
        if self._held is not None and self._held.epoch == epoch:
            self._held = await self._transport.read_marker(self._name)
            if self._held is not None and is_usable(self._held.epoch):
                self._incarnation = self._held.incarnation
                return self._held.epoch
        self._made = Marker(secrets.token_bytes(INCARNATION_BYTES), epoch)
        for _ in range(_ATTEMPTS):
            self._held = await self._transport.swap_marker(self._name, self._held, self._made)
            if self._held is not None:
                self._incarnation = self._held.incarnation
                return self._held.epoch
        raise OSError(errno.EBUSY, "the marker is lost all the time")

    # -- resets ----------------------------------------------------------------------------------------------------

    async def _count(self, epoch: int) -> None:
        """Counts a reset. A failed one is not repeated from the same marker: what follows it may be for the same
        weights."""
        try:
            await self._count_on(epoch)
        except OSError:
            self.leave()
            raise

    async def _count_on(self, epoch: int) -> None:
        for _ in range(_ATTEMPTS):
            held = await self._transport.read_marker(self._name)
            if held is not None and self._is_next(held, epoch):
                self._incarnation = held.incarnation
                return
            following = self._following(held, epoch)
            if await self._transport.swap_marker(self._name, held, following) == following:
                self._incarnation = following.incarnation
                if following.epoch != epoch:
                    self.leave()
                return
        raise OSError(errno.EBUSY, "other processes write the marker")

    def _is_next(self, held: Marker, epoch: int) -> bool:
        """True if another process counted to this marker from the one that this process has.

        The same incarnation with a higher number is not: an earlier release raised it, perhaps when it opened.
        """
        own = self.marker(self._raised)
        return held.epoch == epoch and held.incarnation != own.incarnation and held.lineage == own.lineage

    def _following(self, held: Marker | None, epoch: int) -> Marker:
        """The marker of a reset to this epoch, in place of the one that is there."""
        own = self.marker(self._raised)
        if held == own and line_of(epoch) == line_of(own.epoch) and epoch < EPOCH_CEILING:
            return Marker(own.lineage + secrets.token_bytes(INCARNATION_BYTES - LINEAGE_BYTES), epoch)
        numbers = [one for one in (epoch, held.epoch if held else 0) if is_usable(one)]
        return Marker(secrets.token_bytes(INCARNATION_BYTES), fresh_epoch(max(numbers, default=0)))

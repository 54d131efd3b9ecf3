"""The epoch of a tier's namespace on a server that many processes use."""

import secrets
from collections import Counter

from kvtier.errors import ResourceError
from kvtier.tier_api.shared_epoch import SharedEpoch
from kvtier.types.jobs import BlockOutcome, failed
from kvtier_remote.transport import Marker, Transport

INCARNATION_BYTES = 8
_FAR = 1 << 20
"""More resets than processes that count one by one make."""


class Epochs(SharedEpoch):
    """One namespace's marker, and its epoch in this process.

    No block is stored under an epoch that the server's marker has not reached: a marker that stayed behind would give
    its number to the next process, and what had been stored before would count again.

    Processes that opened with the same incarnation share what they store after as many resets each. One that finds the
    marker further than its own count cannot tell whose weights an epoch of its number means, and goes on alone. One
    that finds a marker made anew keeps its incarnation and moves that marker far on, so that a process that opens
    later finds nothing from before the reset.
    """

    def __init__(self, transport: Transport, name: str, counters: Counter[str]) -> None:
        super().__init__()
        self._transport = transport
        self._name = name
        self._counters = counters
        self._incarnation = secrets.token_bytes(INCARNATION_BYTES)

    def marker(self, epoch: int) -> Marker:
        """What the names of blocks of an epoch contain."""
        return Marker(self._incarnation, epoch)

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

    async def _write(self, epoch: int) -> int:
        held = await self._transport.raise_marker(self._name, self.marker(epoch))
        if self._raised < 0:
            self._incarnation = held.incarnation
            return held.epoch
        if held.incarnation != self._incarnation:
            await self._transport.raise_marker(self._name, held._replace(epoch=held.epoch + _FAR))
        elif held.epoch > epoch:
            self._incarnation = secrets.token_bytes(INCARNATION_BYTES)
        return epoch

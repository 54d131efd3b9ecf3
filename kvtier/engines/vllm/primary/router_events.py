"""vLLM's events of what the tiers hold, from which routers choose an engine.

vLLM keeps the tokens of a block from a store or a hit of it on until the last tier that it waits for has removed it.
Only an event of such a block names tokens and every hash; any other names the block's last hash. So what a tier has
recovered after a restart, or what a router has dropped because the GPU's cache was reset, can be published with tokens
only when a request uses it again. Then it is: as removed and stored, because routers count what is published.
"""

from collections import deque
from collections.abc import Collection, Iterable, Iterator
from itertools import islice
from typing import Any

from vllm.v1.kv_offload.base import Locality, Medium, OffloadingEvent
from vllm.v1.kv_offload.config import OffloadingConfig

from kvtier.engines.vllm.primary.client_driver import ClientDriver
from kvtier.engines.vllm.settings import GroupIds, one_hash_per_key
from kvtier.types import events
from kvtier.types.keys import CPU, OffloadKey

KEYS_PER_STEP = 256
"""Recovered blocks published in one step of the scheduler, at most. Each takes vLLM about 8 us."""
_METADATA_ONLY: dict[str, Any] = (
    {"metadata_only": True} if "metadata_only" in OffloadingEvent.__dataclass_fields__ else {}
)
"""vLLM 0.33 gives tokens up without an event on the wire. With vLLM 0.32 that is a removal of what no router has."""


class RouterEvents:
    """Turns the stack's events into vLLM's, and publishes once more what a request has used.

    Every block is local, because shared tiers have no events. None has an `ownership`: to Dynamo's router that names a
    cache beside the engine's, and it drops the events of one that it does not know. So tiers of one medium are one
    place to routers, and what a tier removes is published once more while another one has it.
    """

    def __init__(self, driver: ClientDriver, ids: GroupIds, config: OffloadingConfig) -> None:
        self._driver = driver
        self._ids = ids
        self._enabled = config.enable_kv_cache_events
        self._describing = self._enabled and bool(config.extra_config.get("self_describing_kv_events", False))
        self._tokens_needed = not one_hash_per_key(config)
        self._recovered: deque[Iterator[OffloadKey]] = deque()
        self._unsure: dict[OffloadKey, None] = {}
        self._lower_tiers: set[str] = set()
        self._in_use = False

    @property
    def waiting(self) -> bool:
        """True while recovered blocks have yet to be published. None are before the first request: routers that look
        for engines may not listen yet."""
        return self._in_use and bool(self._recovered)

    def used(self, keys: Collection[OffloadKey]) -> None:
        """A request loads or stores these blocks, so vLLM has their tokens. `keys` are in the order of the prefix."""
        self._in_use = True
        if self._enabled and keys:
            self._driver.announce(list(keys))

    def unsure(self, keys: Iterable[OffloadKey]) -> None:
        """vLLM has the tokens of these blocks, which may be in no row: then nothing else would have it give them up."""
        if self._describing:
            self._unsure.update(dict.fromkeys(keys))

    def take(self) -> list[OffloadingEvent]:
        """Events since the last call: blocks that became reachable in a tier or ceased to be. What a tier has recovered
        is published in parts, behind the rest."""
        if not self._enabled:
            return []
        published: list[events.OffloadingEvent] = []
        for event in self._driver.take_events():
            if not event.removed and (len(event.keys) > KEYS_PER_STEP or not self._in_use):
                self._recovered.append(iter(event.keys))
            else:
                published.append(event)
            if event.medium != CPU:
                self._lower_tiers.add(event.tier)
        if len(self._lower_tiers) > 1:
            published += self._driver.left_elsewhere(
                [each for each in published if each.removed and each.medium != CPU]
            )
        if self.waiting:
            published += self._next_recovered()
        found = list(map(self._event, published))
        if self._unsure:
            found += self._given_up()
        return found

    def _next_recovered(self) -> list[events.OffloadingEvent]:
        """Some of what was recovered, as far as it is there still. Published out of turn, it is removed first."""
        some = list(islice(self._recovered[0], KEYS_PER_STEP))
        if not some:
            self._recovered.popleft()
        self._driver.announce(some)
        return self._driver.take_events()

    def _event(self, event: events.OffloadingEvent) -> OffloadingEvent:
        """vLLM keeps the tokens until each medium that says so here has removed the block (`removal_expected`).

        A lower tier says so only if its removal could not name all hashes without: it would be the tokens of every
        block on a disk.
        """
        keys = list(map(self._ids.to_vllm, event.keys))
        upper = event.medium == CPU
        medium, expected = (Medium.CPU, True) if upper else (Medium.STORAGE, self._tokens_needed)
        return OffloadingEvent(keys, medium, event.removed, Locality.LOCAL, removal_expected=expected)

    def _given_up(self) -> list[OffloadingEvent]:
        """For blocks that are in no row, and on their way into none."""
        found = dict(zip(self._unsure, self._driver.in_rows(list(self._unsure)), strict=True))
        self._unsure = {key: None for key, there in found.items() if there is None}
        absent = [key for key, there in found.items() if there is False]
        if not absent:
            return []
        named = list(map(self._ids.to_vllm, absent))
        return [OffloadingEvent(named, Medium.CPU, True, Locality.LOCAL, **_METADATA_ONLY)]

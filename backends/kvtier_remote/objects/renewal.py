"""Renewal: an object that is loaded in the second half of its life is copied onto itself, and its life starts again."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from kvtier.tier.block_envelope import decode_slot_header
from kvtier_remote.answers import reading_answers
from kvtier_remote.objects.library import Store, library, store_of
from kvtier_remote.objects.options import ObjectOptions, S3Options
from kvtier_remote.transport import ValueRef

_DAY_NS = 86_400 * 10**9
_AT_ONCE = 4
_NAMES_MAX = 1 << 16
_REPLACING = {"x-amz-metadata-directive": "REPLACE"}
"""Without it S3 refuses to copy an object onto itself."""


@dataclass(frozen=True, slots=True)
class RenewalHooks:
    """The hooks of a tier for renewals: the time, a permit for bytes to write, and counters."""

    wall_ns: Callable[[], int]
    may_write: Callable[[int], Awaitable[bool]]
    counters: Counter[str]


class Renewals:
    """Few copies in flight at once; what finds no place is renewed when it is loaded again.

    The header says when a block was stored first, so young ones cost nothing. An old one may have been renewed since:
    the service says when. A copy counts as bytes written, and each object is looked at once in half a life.

    `counters`: `renewed`, `renew.failed`.
    """

    def __init__(
        self, options: ObjectOptions, hooks: RenewalHooks, in_flight: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._options = options
        self._hooks = hooks
        self._in_flight = in_flight
        self._half_life_ns = (options.expire_days or 0) * _DAY_NS // 2
        self._looked_at: dict[str, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._store: Store = None

    def loaded(self, place: ValueRef, header: memoryview) -> None:
        """An object was loaded; it is renewed later if need be."""
        now, stated = self._hooks.wall_ns(), decode_slot_header(header)
        if stated is None or now - stated.generation < self._half_life_ns or len(self._tasks) >= _AT_ONCE:
            return
        if now - self._looked_at.get(place.name, 0) < self._half_life_ns:
            return
        self._looked_at.pop(place.name, None)  # the oldest come first
        self._looked_at[place.name] = now
        if len(self._looked_at) > _NAMES_MAX:
            del self._looked_at[next(iter(self._looked_at))]
        task = asyncio.get_running_loop().create_task(self._renew(place, now))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _renew(self, place: ValueRef, now_ns: int) -> None:
        try:
            with self._in_flight(), reading_answers():
                async with asyncio.timeout(self._options.request_timeout_seconds):
                    await self._copy(place, now_ns)
        except (OSError, library().exceptions.BaseError):
            self._hooks.counters["renew.failed"] += 1

    async def _copy(self, place: ValueRef, now_ns: int) -> None:
        if self._store is None:
            headers = _REPLACING if isinstance(self._options, S3Options) else {}
            self._store = store_of(self._options, headers)
        written = (await library().head_async(self._store, place.name))["last_modified"]
        if now_ns - int(written.timestamp() * 1e9) < self._half_life_ns:
            return
        if await self._hooks.may_write(place.header_bytes + place.payload_bytes):
            await library().copy_async(self._store, place.name, place.name)
            self._hooks.counters["renewed"] += 1

    def close(self) -> None:
        """Give up the connections."""
        self._store = None

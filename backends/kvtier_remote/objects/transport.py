"""An object store as a transport: a request for each block, as many at once as the options say."""

from __future__ import annotations

import asyncio
import errno
import re
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from datetime import UTC, datetime
from itertools import islice
from typing import ClassVar

import numpy as np

from kvtier.aio.daemon_pool import DaemonPool
from kvtier.aio.shielded_wait import shielded_wait
from kvtier.tier.shared_epoch import EPOCH_CEILING
from kvtier.types.jobs import CORRUPT, MISSING, STORED, BlockOutcome
from kvtier_remote.answers import reading_answers
from kvtier_remote.guard import guarded
from kvtier_remote.objects.bound import look_into
from kvtier_remote.objects.library import Store, library, os_error, outcome_of
from kvtier_remote.objects.options import ObjectOptions
from kvtier_remote.objects.renewal import RenewalHooks, Renewals
from kvtier_remote.transport import Marker, NameFormat, TransportInfo, Value, ValueRef, Verify

_MARKER = re.compile(r"([0-9]{20})\.([0-9a-f]{16})")
_COPYING_THREADS = 2
_NAMES_IN_A_REQUEST = 1000
_LOOK_AGAIN_SECONDS = 0.001
_TAKEN_AT_ONCE_BYTES = (256 << 10) + 4096
"""Values up to this size are copied and verified on the event loop: the way to a thread and back costs more."""


@guarded
class ObjectTransport:
    """Puts go from the rows without a copy; gets arrive in the library's memory, and are copied and verified on threads
    of their own.

    The library has no bound on its requests and takes its time limits once for each attempt, so both are kept here.
    """

    name_format: ClassVar[NameFormat] = NameFormat("/", 2)
    batch_blocks: ClassVar[int] = 1
    batch_bytes: ClassVar[int] = 1
    hedges: ClassVar[bool] = True
    race_seconds: ClassVar[float] = 1.0
    lease_seconds: ClassVar[float] = 3600.0

    def __init__(
        self, options: ObjectOptions, connect: Callable[[], Store], renewing: RenewalHooks | None = None
    ) -> None:
        self._options = options
        self._connect = connect
        self._store: Store = None
        self._closed = False
        self._copies = DaemonPool("kvtier-objects", _COPYING_THREADS)
        self._questions = asyncio.Semaphore(options.requests)
        self._in_flight = 0
        self._none_in_flight = asyncio.Event()
        self._none_in_flight.set()
        self.concurrency = options.requests
        self._renewals = None if renewing is None else Renewals(options, renewing, self._call)

    async def open(self) -> TransportInfo:
        """Look into the bucket once. Raises ConfigError with the key of the option that is wrong."""
        self._store = await self._copies.run(self._connect)
        return await self._copies.run(look_into, self._store, self._options)

    async def close(self, timeout_seconds: float) -> int:
        """Give up the store after the calls in flight, each of which ends within its own time."""
        self._closed = True
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_seconds
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._none_in_flight.wait()
        except TimeoutError:
            return self._in_flight
        self._give_up()
        return await self._copies.close(max(0.0, deadline - loop.time()))

    def _give_up(self) -> None:
        """Let connections and threads go, once nothing is in flight."""
        self._store = None  # and with it the connections
        if self._renewals is not None:
            self._renewals.close()
        self._copies.shutdown()

    @contextmanager
    def _call(self) -> Iterator[None]:
        """Around a call that `close` waits for."""
        self._in_flight += 1
        self._none_in_flight.clear()
        try:
            yield
        finally:
            self._in_flight -= 1
            if not self._in_flight:
                self._none_in_flight.set()
                if self._closed:  # a call that was stuck at the deadline
                    self._give_up()

    @asynccontextmanager
    async def _request(self) -> AsyncIterator[None]:
        """Around what asks the store: it ends in time. Raises OSError once closed."""
        if self._closed:
            raise OSError(errno.ENOTCONN, "the store is closed")
        async with asyncio.timeout(self._options.request_timeout_seconds):
            yield

    # -- blocks --------------------------------------------------------------------------------------------------

    async def present(self, places: Sequence[ValueRef]) -> Sequence[bool | None]:
        """True for each object that is there with the right length. All of a question end within the time of one
        request."""
        try:
            with self._call():
                async with self._request(), asyncio.TaskGroup() as group:
                    asked = [group.create_task(self._has(place)) for place in places]
        except ExceptionGroup as errors:
            raise os_error(errors.exceptions[0]) from None
        except TimeoutError as error:
            raise os_error(error) from None
        return [one.result() for one in asked]

    async def _has(self, place: ValueRef) -> bool:
        async with self._questions:
            try:
                found = await library().head_async(self._store, place.name)
            except FileNotFoundError:
                return False
        return bool(found["size"] == place.header_bytes + place.payload_bytes)

    async def get(self, values: Sequence[Value], verify: Verify) -> list[BlockOutcome]:
        """Read objects."""
        with self._call():
            return await asyncio.gather(*(self._get(i, value, verify) for i, value in enumerate(values)))

    async def _get(self, position: int, value: Value, verify: Verify) -> BlockOutcome:
        """A value of another length is CORRUPT."""
        size = value.place.header_bytes + value.place.payload_bytes
        try:
            with reading_answers():
                async with self._request():
                    read = await self._read(value.place.name, size)
            if read is None:
                return CORRUPT
        except FileNotFoundError:
            return MISSING
        except (OSError, library().exceptions.BaseError) as error:
            return CORRUPT if _is_empty(error) else outcome_of(error)
        taken = (position, value, read, verify)
        small = size <= _TAKEN_AT_ONCE_BYTES
        outcome = _take(*taken) if small else await shielded_wait(self._copies.run(_take, *taken))
        if outcome.ok and self._renewals is not None:
            self._renewals.loaded(value.place, read[: value.place.header_bytes])
        return outcome

    async def _read(self, name: str, size: int) -> memoryview | None:
        """The bytes of an object; None if it has another length. One byte more is asked for, which comes if the object
        is too long; the rest of a body without an end is not read."""
        answer = await library().get_async(self._store, name, options={"range": (0, size + 1)})
        async for read in answer.stream(min_chunk_size=size + 1):
            return memoryview(read) if len(read) == size else None
        return None

    async def put(self, values: Sequence[Value]) -> list[BlockOutcome]:
        """Write objects, each in one request."""
        with self._call():
            return await asyncio.gather(*map(self._put, values))

    async def _put(self, value: Value) -> BlockOutcome:
        payload = value.payload[:]
        try:
            with reading_answers():
                async with self._request():
                    parts = [value.header, payload]
                    await library().put_async(self._store, value.place.name, parts, use_multipart=False)
        except (OSError, library().exceptions.BaseError) as error:
            return outcome_of(error)
        finally:
            await _wait_released(payload)
        return STORED

    async def remove(self, places: Sequence[ValueRef]) -> None:
        """Remove objects, many in a request where the service can. Some services stop at one that is not there; then
        each is removed on its own."""
        async with self._question():
            await self._delete([place.name for place in places])

    async def _delete(self, names: list[str]) -> None:
        try:
            await library().delete_async(self._store, names)
        except FileNotFoundError:
            if len(names) > 1:
                await asyncio.gather(*(self._delete([name]) for name in names))

    async def describe(self, name: str, text: str) -> None:
        """Put it if there is none. The lifecycle rule names blocks only, so it stays."""
        async with self._question():
            try:
                await library().head_async(self._store, name)
            except FileNotFoundError:
                await library().put_async(self._store, name, text.encode(), use_multipart=False)

    # -- markers -------------------------------------------------------------------------------------------------

    async def read_marker(self, name: str) -> Marker | None:
        """The largest epoch counts, of its incarnations the smallest.

        One that is alone and younger than `race_seconds` is looked at once more after that time: another process may
        have seen none, and be making its own. A race that takes longer costs hits until one of them opens again.
        """
        found = await self._markers(name)
        if len(found) == 1 and _age(found) < self.race_seconds:
            found = await self._markers_later(name)
        return min(found, key=precedence, default=None)

    async def swap_marker(self, name: str, held: Marker | None, marker: Marker) -> Marker | None:
        """By one more empty object; none is overwritten. Those before it are removed once it is there."""
        found = await self._markers(name)
        there = min(found, key=precedence, default=None)
        if there != held:
            return await self.read_marker(name)
        async with self._question():
            await library().put_async(self._store, path_of(name, marker), b"", use_multipart=False)
        await self._forget(name, [one for one in found if one != marker])
        found = await (self._markers(name) if held is not None else self._markers_later(name))
        return min(found, key=precedence, default=None)

    async def _markers_later(self, name: str) -> dict[Marker, datetime]:
        await asyncio.sleep(min(self.race_seconds, self._options.request_timeout_seconds / 2))
        return await self._markers(name)

    async def _forget(self, name: str, markers: Sequence[Marker]) -> None:
        """Remove markers that count no more. What cannot be removed is left to the next reset; one that would count
        still does then."""
        paths = [path_of(name, one) for one in islice(markers, _NAMES_IN_A_REQUEST)]
        if paths:
            with suppress(OSError):
                async with self._question():
                    await self._delete(paths)

    async def _markers(self, name: str) -> dict[Marker, datetime]:
        """All markers of a name, and when they were written. A page of the listing takes the time of one request."""
        found: dict[Marker, datetime] = {}
        with self._with_os_errors():
            async with self._request():
                pages = aiter(library().list(self._store, f"{name}/"))
            while True:
                async with self._request():
                    page = await anext(pages, None)
                if page is None:
                    return found
                for one in page:
                    if (stated := stated_marker(one["path"])) is not None:
                        found[stated] = one["last_modified"]

    @contextmanager
    def _with_os_errors(self) -> Iterator[None]:
        """Around requests whose errors are OSErrors, and which `close` waits for."""
        try:
            with self._call():
                yield
        except (OSError, library().exceptions.BaseError) as error:
            raise os_error(error) from None

    @asynccontextmanager
    async def _question(self) -> AsyncIterator[None]:
        """Around requests that end in the time of one, whose errors are OSErrors."""
        with self._with_os_errors():
            async with self._request():
                yield

    async def keep_lease(self, marker: str, lease: str) -> None:
        """Write an empty object; its age says how long it holds. A bucket evicts no marker."""
        async with self._question():
            await library().put_async(self._store, lease, b"", use_multipart=False)


def _age(found: Mapping[Marker, datetime]) -> float:
    return (datetime.now(UTC) - max(found.values())).total_seconds()


def path_of(name: str, marker: Marker) -> str:
    """The object that states a marker."""
    return f"{name}/{marker.epoch:020d}.{marker.incarnation.hex()}"


def stated_marker(path: str) -> Marker | None:
    """The marker that the name of an object states; None for any other name."""
    stated = _MARKER.fullmatch(path.rpartition("/")[2])
    if stated is None or int(stated[1]) >= EPOCH_CEILING:
        return None
    return Marker(bytes.fromhex(stated[2]), int(stated[1]))


def precedence(marker: Marker) -> tuple[int, bytes]:
    """Of several markers of a namespace the one with the least counts: the largest epoch, the smallest incarnation."""
    return -marker.epoch, marker.incarnation


def _is_empty(error: BaseException) -> bool:
    """True for the answer to a range of an object that has no bytes."""
    text = str(error)
    return "status code: 416" in text or "StartTooLarge" in text


def _take(position: int, value: Value, read: memoryview, verify: Verify) -> BlockOutcome:
    """Copy what was read into its row, without the GIL, and verify it there."""
    header = value.place.header_bytes
    np.copyto(np.frombuffer(value.payload, np.uint8), np.frombuffer(read[header:], np.uint8))
    return verify(position, read[:header])


async def _wait_released(payload: memoryview) -> None:
    """Until the library has given up the memory of a row, which takes it a moment after a request was given up.

    Released here, the memory can no longer be taken by a request that had not got to it.
    """
    while True:
        try:
            payload.release()
            return
        except BufferError:
            await asyncio.sleep(_LOOK_AGAIN_SECONDS)

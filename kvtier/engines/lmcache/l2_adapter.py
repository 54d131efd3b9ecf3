"""`KVTierL2Adapter`: an L2 adapter of LMCache's multi-process server over one tier of kvtier."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.api import KeyEntry, KeyListPage, MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.internal_api import L1MemoryDesc, L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import AdapterUsage, L2AdapterInterface
from lmcache.v1.memory_management import MemoryObj
from lmcache.v1.platform import create_event_notifier
from pydantic import Field, field_validator

from kvtier.engines.engine_memory.memory import ArenaMemory
from kvtier.engines.engine_memory.notifying import Changes, NotifyingTier
from kvtier.engines.engine_memory.options import IdentifiedOptions, read_identified
from kvtier.engines.engine_memory.transfers import EngineTransfer
from kvtier.engines.lmcache.compat import RELEASE
from kvtier.engines.lmcache.objects import (
    Named,
    ObjectIndex,
    PieceSizes,
    absent_key,
    object_digest,
    piece_keys,
    prefix_order,
    total_bytes,
)
from kvtier.errors import ConfigError, UsageError
from kvtier.options import ByteSize, Seconds, SharedTierOptions
from kvtier.stack import StackStats
from kvtier.types.geometry import GroupKind, GroupLayout, KVLayout
from kvtier.types.jobs import JobKind
from kvtier.types.keys import OffloadKey
from kvtier.types.namespace import Namespace

PIECE_SIZES = 4
"""Sizes of the pieces of an object, each half of the one before."""
PAGE_BYTES = 4096


class L2Options(IdentifiedOptions):
    """The keys of `adapter_params` beside those of the tier."""

    piece_bytes: ByteSize = Field(
        default=1 << 20,
        ge=64 << 10,
        le=64 << 20,
        description="an object is kept in pieces of this size, and its end in pieces of a half, a quarter and an "
        "eighth of it; a multiple of 32 KiB",
    )
    job_timeout_seconds: Seconds = Field(
        default=10.0, description="after this what has not been loaded is a miss, and what has not been stored is not"
    )
    lookup_timeout_seconds: Seconds = Field(
        default=1.0, description="how long a lookup waits for a tier that hosts share"
    )

    @field_validator("piece_bytes")
    @classmethod
    def _check_pieces(cls, value: int) -> int:
        smallest = PAGE_BYTES << (PIECE_SIZES - 1)
        if value % smallest:
            raise ValueError(f"must be a multiple of {smallest >> 10} KiB")
        return value


NO_ARENA = "LMCache names no L1 memory in which objects are; kvtier needs an L1 of one stretch of host memory"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Wanted:
    """An object of a call: its position in it, and the keys of its pieces, the first to be evicted last."""

    at: int
    digest: bytes
    size: int
    keys: Sequence[OffloadKey]


class KVTierL2Adapter(L2AdapterInterface):  # type: ignore[misc]
    """A tier that is bounded, verified and found again after a restart, below the L1 memory of LMCache's server.

    No call waits for I/O, but the constructor and `close`. What a disk or a server does is an object that is not
    found, not loaded or not stored. Once a task is reported, nothing here touches the memory of its objects.
    """

    def __init__(self, adapter_params: Mapping[str, Any], l1_memory_desc: L1MemoryDesc | None = None) -> None:
        """Open the tier. Raises ConfigError, ResourceError or GeometryError, and nothing is left behind then."""
        options = read_identified(L2Options, adapter_params, RELEASE)
        if l1_memory_desc is None or not l1_memory_desc.ptr:
            raise ConfigError(NO_ARENA, RELEASE.options)
        self._options = options
        self._shared_tier = isinstance(options, SharedTierOptions)
        super().__init__(max_capacity_bytes=0 if self._shared_tier else options.capacity_bytes or 0)
        self._lock = threading.Lock()
        self._sizes = PieceSizes.of(options.piece_bytes, PIECE_SIZES)
        self._index = ObjectIndex(self._sizes)
        self._class_sizes: dict[tuple[str, int, int], int] = {}
        self._task_ids = itertools.count(1)
        self._stored: dict[int, L2StoreResult] = {}
        self._found: dict[int, Bitmap] = {}
        self._loaded: dict[int, Bitmap] = {}
        self._listener_errors = 0
        self._closed = False
        self._arena_begin = l1_memory_desc.ptr
        self._memory = ArenaMemory(l1_memory_desc.ptr, l1_memory_desc.size, self._sizes.sizes)
        self._tier = NotifyingTier(options, namespace_of(options, self._sizes), self._memory, options.label, _log)
        try:
            self._store_event, self._lookup_event, self._load_event = (create_event_notifier() for _ in range(3))
        except BaseException:
            self._tier.close()
            raise
        self._tier.start(self._on_changes)

    def get_store_event_fd(self) -> int:
        return int(self._store_event.fileno())

    def get_lookup_and_lock_event_fd(self) -> int:
        return int(self._lookup_event.fileno())

    def get_load_event_fd(self) -> int:
        return int(self._load_event.fileno())

    # -- stores --------------------------------------------------------------------------------------------------

    def submit_store_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        """Begin to store objects. The task succeeds if each of them is stored, now or before."""
        task = next(self._task_ids)
        sizes = [int(each.get_size()) for each in objects]
        wanted = self._wanted(keys, _digests(keys), sizes)
        if self._shared_tier:
            with self._lock:
                self._class_sizes.update((_size_class(keys[each.at]), each.size) for each in wanted)
        end = partial(self._end_store, task, keys, wanted)
        self._move(JobKind.STORE, wanted, objects, end)
        return task

    def _end_store(
        self, task: int, keys: Sequence[ObjectKey], wanted: Sequence[_Wanted], outcomes: Mapping[int, list[bool]]
    ) -> None:
        good = [each for each in wanted if all(outcomes.get(each.at, [False]))]
        names = [(each.digest, keys[each.at]) for each in good]
        with self._lock:
            new = [(keys[each.at], each.size) for each in good] if self._shared_tier else self._index.announce(names)
            moved = sum(size for _, size in new)
            self._stored[task] = L2StoreResult(len(good) == len(keys), moved)
        self._report(self._notify_keys_stored, new)
        self._store_event.notify()

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        with self._lock:
            stored, self._stored = self._stored, {}
        return stored

    # -- lookups -------------------------------------------------------------------------------------------------

    def submit_lookup_and_lock_task(
        self, keys: list[ObjectKey], group_layout_descs: dict[int, MemoryLayoutDesc]
    ) -> int:
        """Look objects up. Those that are found are kept for `lease_seconds`, or until they are unlocked.

        One piece of each is looked up, so that the tier counts objects: an owned one has the others too.
        """
        task = next(self._task_ids)
        digests = _digests(keys)
        wanted = self._wanted(keys, digests, self._known_sizes(keys, digests, group_layout_descs))
        unknown = set(digests).difference(each.digest for each in wanted)
        asked = [each.keys[-1] for each in wanted] + [absent_key(digest) for digest in unknown]
        end = partial(self._end_lookup, task, keys, wanted)
        self._tier.find(asked, self._options.lookup_timeout_seconds, end)
        return task

    def _end_lookup(
        self, task: int, keys: Sequence[ObjectKey], wanted: Sequence[_Wanted], found: Sequence[bool]
    ) -> None:
        here = [each for each, there in zip(wanted, found, strict=False) if there]
        self._tier.lease([key for each in here for key in each.keys])
        bits = Bitmap(len(keys))
        for each in here:
            bits.set(each.at)
        with self._lock:
            new = self._index.announce([(each.digest, keys[each.at]) for each in here])
            self._found[task] = bits
        self._report(self._notify_keys_stored, new)
        self._lookup_event.notify()

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        with self._lock:
            return self._found.pop(task_id, None)

    def submit_unlock(self, keys: list[ObjectKey]) -> None:
        """Ends one lease of each object."""
        self._tier.release(self._piece_keys(keys))

    # -- loads ---------------------------------------------------------------------------------------------------

    def submit_load_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        """Begin to load objects. An object is loaded with exactly the bytes that were stored, or it is not loaded."""
        task = next(self._task_ids)
        digests = _digests(keys)
        known = self._known_sizes(keys, digests, {})
        sizes = [self._size_to_load(size, each) for size, each in zip(known, objects, strict=True)]
        wanted = self._wanted(keys, digests, sizes)
        self._move(JobKind.LOAD, wanted, objects, partial(self._end_load, task, keys, wanted))
        return task

    def _size_to_load(self, known: int, target: MemoryObj) -> int:
        """The bytes to load into an object's memory. Those of a serializer may be fewer than it has room for."""
        room = int(target.get_size())
        if self._shared_tier or known == room:
            return room
        serialized = target.get_dtype() == torch.uint8 and len(target.get_shape()) == 1
        return known if serialized and known < room else 0

    def _end_load(
        self, task: int, keys: Sequence[ObjectKey], wanted: Sequence[_Wanted], outcomes: Mapping[int, list[bool]]
    ) -> None:
        bits = Bitmap(len(keys))
        good = [each for each in wanted if all(outcomes.get(each.at, [False]))]
        for each in good:
            bits.set(each.at)
        with self._lock:
            self._loaded[task] = bits
        self._report(self._notify_keys_accessed, [(keys[each.at], each.size) for each in good], sized=False)
        self._load_event.notify()

    def query_load_result(self, task_id: int) -> Bitmap | None:
        with self._lock:
            return self._loaded.pop(task_id, None)

    # -- objects and their blocks --------------------------------------------------------------------------------

    def _wanted(self, keys: Sequence[ObjectKey], digests: Sequence[bytes], sizes: Sequence[int]) -> list[_Wanted]:
        """The objects of a call whose size is known, in the order of their prefix."""
        wanted = []
        for at in prefix_order(keys):
            if 0 < sizes[at] <= self._sizes.largest_object:
                pieces = piece_keys(digests[at], sizes[at], self._sizes.cut(sizes[at]))
                wanted.append(_Wanted(at, digests[at], sizes[at], pieces[::-1]))
        return wanted

    def _known_sizes(
        self, keys: Sequence[ObjectKey], digests: Sequence[bytes], layouts: Mapping[int, MemoryLayoutDesc]
    ) -> list[int]:
        """The sizes of objects; 0 for those that are not here, or of unknown size.

        An owned tier has the sizes of what is stored. In a shared one objects of one model, rank and group have the
        size of those that were stored last, or else of the layout that LMCache names.
        """
        if not self._shared_tier:
            with self._lock:
                return [self._index.size(digest) or 0 for digest in digests]
        of_layout = {
            group: total_bytes(layout.shapes, (dtype.itemsize for dtype in layout.dtypes)) if layout.shapes else 0
            for group, layout in layouts.items()
        }
        with self._lock:
            return [self._class_sizes.get(_size_class(key)) or of_layout.get(key.object_group_id, 0) for key in keys]

    def _piece_keys(self, keys: Sequence[ObjectKey]) -> list[OffloadKey]:
        """The keys of the pieces of those objects that are here."""
        digests = _digests(keys)
        wanted = self._wanted(keys, digests, self._known_sizes(keys, digests, {}))
        return [key for each in wanted for key in each.keys]

    def _move(
        self,
        kind: JobKind,
        wanted: Sequence[_Wanted],
        objects: Sequence[MemoryObj],
        end: Callable[[Mapping[int, list[bool]]], None],
    ) -> None:
        """Begin to move objects; `end` gets for each of them which of its pieces were."""
        owners, places = [], []
        try:
            for each in wanted:
                offset = int(objects[each.at].data_ptr) - self._arena_begin
                for piece in reversed(self._sizes.cut(each.size)):
                    owners.append(each.at)
                    places.append(self._memory.place(piece.group, offset + piece.offset, piece.length))
            keys = [key for each in wanted for key in each.keys]
            self._tier.transfer(kind, keys, places, lambda transfer: end(_by_object(owners, transfer)))
        except UsageError as error:
            _log.error("objects are not where LMCache said that its L1 memory is: %s", error)
            end({})

    # -- reports to LMCache --------------------------------------------------------------------------------------

    def _on_changes(self, changes: Changes) -> None:
        for removed, keys in changes:
            with self._lock:
                gone = [] if self._shared_tier else self._index.follow(removed, keys)
            self._report(self._notify_keys_deleted, gone)

    def _report(self, notify: Callable[..., None], objects: Named, sized: bool = True) -> None:
        """Call LMCache's listeners, which are not kvtier's: what they raise is counted."""
        if not objects:
            return
        keys, sizes = [key for key, _ in objects], [size for _, size in objects]
        try:
            notify(keys, sizes) if sized else notify(keys)
        except Exception:
            self._listener_errors += 1
            _log.exception("a listener of LMCache failed")

    def submit_touch(self, keys: list[ObjectKey]) -> None:
        """The objects were used in L1: they outlive others here too."""
        self._tier.touch(self._piece_keys(keys))
        self._report(self._notify_keys_accessed, [(key, 0) for key in keys], sized=False)

    def delete(self, keys: list[ObjectKey]) -> None:
        """Drop objects that are not locked. Those of a shared tier stay: other servers may use them."""
        if not self._shared_tier:
            self._tier.remove(self._piece_keys(keys))

    def list_l2_keys(
        self, model_name: str | None = None, page_size: int = 500, cursor: str | None = None
    ) -> KeyListPage:
        """The objects that were reported to LMCache: stored since the start, or found again since then.

        Raises NotImplementedError for a shared tier, ValueError for a page size or cursor that cannot be.
        """
        if self._shared_tier:
            raise NotImplementedError(f"a tier of type {self._options.type} does not list its objects")
        if page_size <= 0:
            raise ValueError(f"page_size must be positive, got {page_size}")
        with self._lock:
            shown, last = self._index.page(model_name, page_size, bytes.fromhex(cursor or ""))
        entries = tuple(KeyEntry(key.to_encoded_object_key(), size) for key, size in shown)
        return KeyListPage(entries, last.hex() or None)

    def get_usage(self) -> AdapterUsage:
        """Bytes used of the capacity, padding and what was recovered included; of a shared tier nothing is known.

        The bytes of each cache salt are those of objects that were reported to LMCache.
        """
        known = super().get_usage()
        if self._shared_tier:
            return AdapterUsage(0, 0)
        owned = self._tier.plane.lower.owned
        used = owned.used_bytes if owned is not None else 0
        return AdapterUsage(used, known.total_capacity_bytes, known.bytes_by_cache_salt)

    def get_memory_tags(self) -> Any:
        """Local or remote storage. Called by LMCache 0.5.7."""
        from lmcache.v1.distributed.api import MemoryResidency, MemorySegment, MemoryTags  # absent in 0.5.6

        residency = MemoryResidency.REMOTE if self._shared_tier else MemoryResidency.LOCAL
        return MemoryTags(MemorySegment.STORAGE, residency)

    def report_status(self) -> dict[str, Any]:
        """Health and figures for LMCache's status page."""
        figures = self.stats().tiers[self._options.label]
        return {
            "is_healthy": not self._closed and self._tier.thread.alive and figures.breaker == "closed",
            "type": f"kvtier {self._options.type}",
            "objects": len(self._index),
            "capacity_bytes": figures.capacity_bytes,
            "used_bytes": figures.used_bytes,
            "stored": figures.stored,
            "loaded": figures.loaded,
            "evictions": figures.evictions,
            "breaker": figures.breaker,
            "dropped": dict(figures.dropped),
            "failed": figures.failed,
            "corrupt": figures.corrupt,
            "missing": figures.missing,
            "late": figures.late,
            "listener_errors": self._listener_errors,
        }

    def stats(self) -> StackStats:
        """kvtier's figures since the start, also after closing."""
        return self._tier.stats()

    def close(self) -> None:
        """Store what is in flight within the deadline, release LMCache's memory and close the tier. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._tier.close()
        for event in (self._store_event, self._lookup_event, self._load_event):
            event.close()


def _digests(keys: Sequence[ObjectKey]) -> list[bytes]:
    """The digests of the objects of a call; hashed once for all of its steps."""
    return list(map(object_digest, keys))


def _size_class(key: ObjectKey) -> tuple[str, int, int]:
    """The model, rank and group of an object: in a shared tier the objects of one of these have one size."""
    return key.model_name, key.kv_rank, key.object_group_id


def _by_object(owners: Sequence[int], transfer: EngineTransfer) -> Mapping[int, list[bool]]:
    moved: dict[int, list[bool]] = {}
    for at, outcome in zip(owners, transfer.outcomes, strict=True):
        moved.setdefault(at, []).append(outcome.ok)
    return moved


def namespace_of(options: L2Options, sizes: PieceSizes) -> Namespace:
    """Everything that identifies the objects beside their keys."""
    groups = [
        GroupLayout.of_pages(size, block_size=1, first_tensor=group, kind=GroupKind.MAMBA)
        for group, size in enumerate(sizes.sizes)
    ]
    return Namespace(
        layout=KVLayout(groups),
        weights=options.weights_digest(RELEASE.options),
        hash_algorithm="lmcache object key",
        tag=options.namespace,
        extra={"engine": f"lmcache {RELEASE.version}"},
    )

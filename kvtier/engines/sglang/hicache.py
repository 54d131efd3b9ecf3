"""`KVTierHiCache`: SGLang's storage backend over one tier of kvtier."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)
from sglang.srt.observability.metrics_collector import StorageMetrics

from kvtier.engines.engine_memory.memory import PagedMemory
from kvtier.engines.engine_memory.service import ServiceTier
from kvtier.engines.engine_memory.tier import BlockingTier
from kvtier.engines.sglang.compat import RELEASE
from kvtier.engines.sglang.identity import MAIN_POOL, namespace_of
from kvtier.engines.sglang.options import hicache_options, rank_key, rank_options
from kvtier.engines.sglang.pools import HostPool
from kvtier.errors import ConfigError, UsageError
from kvtier.planner.prefix import Presence, usable_prefixes, window_start
from kvtier.stack import StackStats
from kvtier.types.geometry import GroupKind, GroupLayout, KVLayout, TensorRef
from kvtier.types.jobs import JobKind
from kvtier.types.keys import OffloadKey, make_key

GIB = 1 << 30
HASH_BYTES = 32
OLD_INTERFACE = "pages have no addresses here; write interface_v1: 1 beside the class name"
PAGE = TensorRef(0, 1)
EVERY_PAGE = GroupLayout((PAGE,), 1)
_log = logging.getLogger(__name__)


class KVTierHiCache(HiCacheStorage):  # type: ignore[misc]
    """A tier that is bounded, verified and found again after a restart, or a service, below SGLang's host memory.

    SGLang calls it from three threads; each call waits, and no longer than its `..._timeout_seconds`. What a disk or a
    server does is a miss or a page that was not stored, never an exception. After a call has returned, nothing here
    touches the host memory that it named.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: dict[str, Any] | None = None) -> None:
        """Check the configuration. Raises ConfigError with one line for each thing that is wrong; opens nothing."""
        options = hicache_options(storage_config.extra_config)
        if storage_config.should_split_heads:
            raise ConfigError("pages of split heads are not served", f"{RELEASE.options}.tp_lcm_size")
        self._config = storage_config
        self._options = rank_options(storage_config, options)
        self._tier: BlockingTier | ServiceTier | None = None
        self._pools: dict[str, tuple[int, HostPool]] = {}
        self._sharded_key = storage_config.tp_rank.to_bytes(4, "big") if storage_config.is_mla_model else b""
        self._rank_key = rank_key(storage_config, self._options)
        self._meter = TransferMeter(storage_config.enable_storage_metrics)
        self.registered_pools: dict[str, Any] = {}

    # -- opening and closing -------------------------------------------------------------------------------------

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """SGLang's main host pool."""
        self.mem_pool_host = mem_pool_host
        self.registered_pools[MAIN_POOL] = mem_pool_host

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: str) -> None:
        """A side pool; one that comes after opening has the tier opened again, with the pages of all pools."""
        self.registered_pools[_name(host_pool_name)] = host_pool
        if self._tier is not None and _name(host_pool_name) not in self._pools:
            self.close()
            self.on_host_pools_registered()

    def on_host_pools_registered(self) -> None:
        """Open the tier. Raises ConfigError, ResourceError or GeometryError, and nothing is left behind then."""
        pools = [HostPool.of(name, pool) for name, pool in self.registered_pools.items()]
        memory = PagedMemory([[pieces.array() for pieces in pool.pieces] for pool in pools])
        namespace = namespace_of(self._config, self._options, pools)
        options = self._options
        if options.service:
            self._tier = ServiceTier(options, namespace, memory, "sglang", _log)
        else:
            self._tier = BlockingTier(options, namespace, memory, options.label, _log)
        self._pools = {pool.name: (group, pool) for group, pool in enumerate(pools)}

    def close(self) -> None:
        """Store what is in flight within the deadline and release SGLang's memory. Idempotent; attach reopens it."""
        if self._tier is not None:
            self._tier.close()

    def clear(self) -> bool:
        """Nothing stored so far is found any more, also after a restart.

        Raises ResourceError if the latter could not be made sure in time.
        """
        if self._tier is not None:
            self._tier.reset(self._options.store_timeout_seconds)
        return True

    # -- pages of the main pool ----------------------------------------------------------------------------------

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        """The number of pages that are here from the first on. They are kept for `lease_seconds`, or until they are
        loaded."""
        if self._tier is None or not keys:
            return 0
        names = self._keys(MAIN_POOL, keys)
        count = _leading(self._tier.find(names, self._options.lookup_timeout_seconds))
        self._tier.lease(names[:count])
        return count

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Load pages; True for those that hold what was stored."""
        return self.batch_get_v2([PoolTransfer(PoolName.KV, host_indices, keys=keys)])[PoolName.KV]

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Store pages; True for those that are stored, now or before."""
        return self.batch_set_v2([PoolTransfer(PoolName.KV, host_indices, keys=keys)])[PoolName.KV]

    # -- pages of several pools ----------------------------------------------------------------------------------

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """The lengths of the prefix that are whole in every pool, and the longest one of each pool.

        A pool of `all_pages` needs every page, one of `trailing_pages` the last ones: see `kvtier.planner.prefix`.
        """
        if self._tier is None or not keys:
            return PoolTransferResult.empty()
        rules = [(MAIN_POOL, EVERY_PAGE)]
        rules += [(_name(each.name), _rule(each)) for each in pool_transfers or []]
        present = self._find([name for name, _ in rules], keys)
        lengths = {}
        for name, group in rules:
            pages = (present[MAIN_POOL], present[name])
            lengths[name] = next(_lengths((EVERY_PAGE, group), pages, len(keys)), 0)
        usable = list(_lengths([group for _, group in rules], [present[name] for name, _ in rules], len(keys)))
        longest = usable[0] if usable else 0
        for name, group in rules:
            first = window_start(group, longest)
            if name in self._pools:
                self._tier.lease(self._keys(name, keys[first:longest]))
        found = {name: length for name, length in lengths.items() if length}
        return PoolTransferResult(longest, found, usable[::-1])

    def _find(self, pools: Sequence[str], keys: Sequence[str]) -> dict[str, list[bool]]:
        """The pages of each pool that are here, in one lookup."""
        assert self._tier is not None
        known = [name for name in dict.fromkeys(pools) if name in self._pools]
        asked = [key for name in known for key in self._keys(name, keys)]
        answers = iter(self._tier.find(asked, self._options.lookup_timeout_seconds))
        found = {name: [next(answers) for _ in keys] for name in known}
        return {name: found.get(name) or [False] * len(keys) for name in pools}

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Load pages of pools; True for those that hold what was stored."""
        return self._move(JobKind.LOAD, transfers)

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Store pages of pools; True for those that are stored, now or before."""
        return self._move(JobKind.STORE, transfers)

    def _move(self, kind: JobKind, transfers: Sequence[PoolTransfer]) -> dict[str, list[bool]]:
        results = {_name(transfer.name): [False] * len(transfer.keys or []) for transfer in transfers}
        pages = [each for transfer in transfers if (each := self._pages_of(transfer)) is not None]
        keys = [key for each in pages for key in each.keys]
        places = [place for each in pages for place in each.places]
        if self._tier is None or not keys:
            return results
        began = time.monotonic()
        if kind is JobKind.LOAD:
            outcomes = self._tier.load(keys, places, self._options.load_timeout_seconds)
            self._tier.release(keys)
        else:
            outcomes = self._tier.store(keys, places, self._options.store_timeout_seconds)
        good = [outcome.ok for outcome in outcomes]
        moved = sum(each.page_bytes * len(each.keys) for each in pages) * sum(good) // len(good)
        self._meter.count(kind, sum(good), moved, time.monotonic() - began)
        answers = iter(good)
        for each in pages:
            results[each.pool] = [next(answers) for _ in each.keys]
        return results

    # -- pages one by one: SGLang's older interface, which `interface_v1` replaces -------------------------------

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        raise UsageError(OLD_INTERFACE)

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        raise UsageError(OLD_INTERFACE)

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        raise UsageError(OLD_INTERFACE)

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        raise UsageError(OLD_INTERFACE)

    def exists(self, key: str) -> bool:
        """`batch_exists` of one page."""
        return self.batch_exists([key]) == 1

    # -- figures -------------------------------------------------------------------------------------------------

    def get_stats(self) -> StorageMetrics | None:
        """Pages and speeds of the calls since the last reading, for SGLang's own metrics; None unless they are on."""
        return self._meter.read()

    def stats(self) -> StackStats | None:
        """kvtier's figures since the tier was opened, also after closing; None before that."""
        return self._tier.stats() if self._tier is not None else None

    # -- keys and places -----------------------------------------------------------------------------------------

    def _keys(self, pool: str, keys: Sequence[str]) -> list[OffloadKey]:
        """The keys of pages. States of Mamba are each rank's own, also where the ranks share the rest."""
        group = self._pools[pool][0]
        end = self._rank_key + (self._sharded_key if pool == PoolName.MAMBA.value else b"")
        return [make_key(_hash(key) + end, group) for key in keys]

    def _pages_of(self, transfer: PoolTransfer) -> _Pages | None:
        """The pages of a transfer; None for one that does not fit its pool."""
        name, keys = _name(transfer.name), transfer.keys or []
        known = self._pools.get(name)
        places = known[1].places(transfer.host_indices, len(keys)) if known is not None else None
        if known is None or places is None:
            _log.error("the pool %s is unknown, or %d keys do not fit the indices given for them", name, len(keys))
            return None
        return _Pages(name, self._keys(name, keys), places, sum(known[1].piece_bytes))


@dataclass(frozen=True, slots=True)
class _Pages:
    """Pages of one pool that are to be moved."""

    pool: str
    keys: list[OffloadKey]
    places: list[int]
    page_bytes: int


class TransferMeter:
    """Figures for SGLang's metrics: pages and GiB/s of each call since the last reading. Called by several threads."""

    def __init__(self, enabled: bool) -> None:
        self._enabled = enabled
        self._lock = threading.Lock()
        self._metrics = StorageMetrics()

    def count(self, kind: JobKind, pages: int, moved_bytes: int, seconds: float) -> None:
        """Counts a call that has ended."""
        if not self._enabled or not pages:
            return
        speed = moved_bytes / GIB / max(seconds, 1e-6)
        with self._lock:
            found = self._metrics
            counts, speeds = (
                (found.prefetch_pgs, found.prefetch_bandwidth)
                if kind is JobKind.LOAD
                else (found.backup_pgs, found.backup_bandwidth)
            )
            counts.append(pages)
            speeds.append(speed)

    def read(self) -> StorageMetrics | None:
        """The figures since the last reading."""
        if not self._enabled:
            return None
        with self._lock:
            found, self._metrics = self._metrics, StorageMetrics()
        return found


def _name(pool: str) -> str:
    """A pool's name as a plain text."""
    return pool.value if isinstance(pool, PoolName) else str(pool)


def _hash(key: str) -> bytes:
    """A page's hash: 64 hexadecimal digits as the bytes they name, another text as itself."""
    if len(key) == 2 * HASH_BYTES:
        try:
            return bytes.fromhex(key)
        except ValueError:
            pass
    return b"text:" + key.encode()


def _leading(found: Sequence[bool]) -> int:
    return next((at for at, there in enumerate(found) if not there), len(found))


def _rule(transfer: PoolTransfer) -> GroupLayout:
    """The pages of a pool that a prefix needs, a page counted as one token.

    Raises UsageError for a rule that the planner does not have.
    """
    if transfer.hit_policy is PoolHitPolicy.ALL_PAGES:
        return EVERY_PAGE
    if transfer.hit_policy is PoolHitPolicy.TRAILING_PAGES:
        trailing = max(1, len(transfer.keys or ()))
        return GroupLayout((PAGE,), 1, GroupKind.SLIDING_WINDOW, trailing)
    raise UsageError(
        f"the pool {_name(transfer.name)} has the hit policy {transfer.hit_policy.value}; kvtier serves all_pages and "
        "trailing_pages"
    )


def _lengths(groups: Sequence[GroupLayout], present: Sequence[Presence], pages: int) -> Iterator[int]:
    """The lengths of a prefix of `pages` pages that are whole in every group, the longest first."""
    return usable_prefixes(KVLayout(groups), present, pages + 1)

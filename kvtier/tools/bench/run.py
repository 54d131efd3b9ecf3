"""The whole measurement of a stack file: the copies at the layout's block size, then every root at several sizes."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from kvtier.cli.temporary_folders import temporary_folder
from kvtier.config import StackConfig, build_tiers, find_tier
from kvtier.errors import ConfigError, ResourceError, UsageError
from kvtier.options import LowerTierOptions, TierOptions, folders_of, in_folders
from kvtier.stack.assembly import resolve_alignment
from kvtier.tier.contract import LoadStore, Opened, ProvidesRows, Rows, TierContext
from kvtier.tier.registry import discover
from kvtier.tools.bench.load_generator import Timing
from kvtier.tools.bench.measure import Blocks, LowerTierBench, measure_copies, measure_memcpy
from kvtier.tools.bench.results import Figure, TierFigures
from kvtier.types.geometry import Geometry, KVLayout, round_up
from kvtier.types.keys import CPU, GPU
from kvtier.types.namespace import Namespace

PREFIX = ".kvtier-bench-"
"""Of temporary space on the file system of a root, which no tier reads and which is removed afterwards."""
INFLIGHT_BYTES = 64 << 20
CAPACITY_FIXED_BYTES = 4 << 20
CAPACITY_SHARE = 1.1
SLOT_EXTRA_BYTES = 8192


@dataclass(frozen=True, slots=True)
class Bounds:
    """Extent of a measurement: `seconds` of each figure, `num_bytes` of each tier at a time, other block sizes (bytes).

    `device` is where the KV tensors are, `seed` what the blocks' content comes from.
    """

    seconds: float
    num_bytes: int
    sizes: tuple[int, ...]
    device: str
    seed: int


class Bench:
    """Measures the tiers of one stack, one after another. Nothing that is stored in them is touched."""

    def __init__(self, config: StackConfig, layout: KVLayout, bounds: Bounds) -> None:
        self._config = config
        self._layout = layout
        self._bounds = bounds
        self._backends = discover()

    async def run(self, progress: Callable[[str], None] = lambda what: None) -> list[TierFigures]:
        """The figures of every tier from the GPU down, several places of one tier one after another.

        `progress` is given what is measured next. Raises KVTierError if a tier cannot be opened or does not keep a
        block; what was made for the measurement is removed all the same.
        """
        alignment = await resolve_alignment(build_tiers(self._config, self._backends))
        geometry = Geometry(self._layout, alignment)
        progress("copies between GPU blocks and rows")
        found = await self._measure_copies(geometry)
        for options in self._config.tiers:
            medium = self._backends.get(options.type).medium
            if medium in (GPU, CPU):
                continue
            if not folders_of(options):
                reason = "it keeps its blocks in no folder that a place of its own could be made beside"
                found.append(TierFigures(options.label, medium, skipped=reason))
            for place, roots in _places(options).items():
                found.append(TierFigures(options.label, medium, place))
                sizes = {geometry.row_bytes, *(round_up(size, alignment) for size in self._bounds.sizes)}
                for size in sorted(sizes):
                    progress(f"{options.label}, {place}, blocks of {size >> 10} KiB")
                    await self._measure_lower(options, roots, size, geometry, found[-1])
        return found

    async def _measure_copies(self, geometry: Geometry) -> list[TierFigures]:
        """The GPU and the CPU tier, at the layout's own block size."""
        bounds = self._bounds
        blocks = Blocks(geometry, bounds.num_bytes, bounds.device, bounds.seed)
        gpu, cpu = self._gpu(), self._cpu(blocks.num_rows * geometry.row_bytes)
        found = [TierFigures(tier.options.label, tier.medium) for tier in (gpu, cpu)]
        async with AsyncExitStack() as closing:
            started = time.perf_counter()
            opened = await _open(cpu, geometry, closing, found[1], workers=[gpu])
            populated = Timing(seconds=time.perf_counter() - started, moved_bytes=opened.capacity_bytes)
            rows = _rows(cpu)
            await _open(gpu, geometry, closing, found[0], kv_caches=blocks.tensors, rows=rows)
            for tier, figures in zip((gpu, cpu), found, strict=True):
                await measure_copies(blocks, rows, tier, bounds.seconds, figures)
            found[1].figures.append(Figure("populate", 0, populated))
            found[1].figures.append(Figure("memcpy", 0, measure_memcpy(rows, bounds.seconds)))
        return found

    async def _measure_lower(
        self, options: TierOptions, roots: Sequence[str], size: int, whole: Geometry, found: TierFigures
    ) -> None:
        """Measure a tier at one block size, in temporary places beside these roots and on a separate region of rows."""
        bounds = self._bounds
        geometry = Geometry(KVLayout.of_pages(size), whole.alignment)
        num_rows = max(1, bounds.num_bytes // size)
        capacity = int(num_rows * (size + SLOT_EXTRA_BYTES) * CAPACITY_SHARE)
        capacity += (size + CAPACITY_FIXED_BYTES) * len(roots)
        inflight = options.inflight_bytes if isinstance(options, LowerTierOptions) else INFLIGHT_BYTES
        cpu = self._cpu(num_rows * size)
        async with AsyncExitStack() as closing:
            places = [closing.enter_context(folder_beside(root)) for root in roots]
            tier = self._backends.get(options.type)(in_folders(options, places).with_capacity(capacity))
            await _open(cpu, geometry, closing)
            opened = await _open(tier, geometry, closing, found, rows=_rows(cpu))
            bench = LowerTierBench(tier, opened, _rows(cpu), bounds.seed, found)
            try:
                await bench.measure(bounds.seconds, inflight, _bytes_per_token(whole) if size == whole.row_bytes else 0)
            except ResourceError as error:
                raise ResourceError(f"tier {found.name}, {found.place}: {error}") from error

    def _gpu(self) -> LoadStore:
        options = find_tier(self._config, GPU, self._backends)
        backend = self._backends.get(options.type if options else "gpu")
        return backend(options or backend.Options(type="gpu"))

    def _cpu(self, num_bytes: int) -> LoadStore:
        """The stack's CPU tier with other bytes, of this process alone."""
        options = find_tier(self._config, CPU, self._backends)
        assert options is not None
        return self._backends.get(options.type)(options.with_capacity(num_bytes).with_known(shared="auto"))


async def _open(
    tier: LoadStore, geometry: Geometry, closing: AsyncExitStack, found: TierFigures | None = None, **more: Any
) -> Opened:
    """Open a tier, to be closed with `closing`, and note what it is."""
    closing.push_async_callback(tier.close)
    namespace = Namespace(geometry.layout, model="kvtier-bench")
    opened = await tier.open(TierContext(tier.options.label, geometry, namespace, time.monotonic, **more))
    if found is not None:
        found.mode, found.notes = opened.mode, opened.notes
    return opened


def _bytes_per_token(geometry: Geometry) -> float:
    """Bytes that a lower tier moves for one token of the layout, all groups together."""
    groups = range(geometry.num_groups)
    return sum(geometry.aligned_bytes(group) / geometry.tokens_per_offloaded_block(group) for group in groups)


def _places(options: TierOptions) -> dict[str, Sequence[str]]:
    """The roots that are measured together, by name: each root alone, then all of them."""
    roots = folders_of(options)
    alone: dict[str, Sequence[str]] = {root: (root,) for root in roots}
    return alone | ({f"{len(roots)} roots together": roots} if len(roots) > 1 else {})


def _rows(cpu: LoadStore) -> Rows:
    if not isinstance(cpu, ProvidesRows):
        raise UsageError("the cpu tier provides no rows")
    return cpu.rows


@contextmanager
def folder_beside(root: str) -> Iterator[str]:
    """A path for a temporary root on the file system of `root`. It does not exist yet, and its content is removed.

    It lies in a new folder beside the root, or inside the root where that is a mount or its parent cannot be written.
    What a killed tool left there is removed first. Raises ConfigError if there is no place to write.
    """
    parent = _parent_for(root)
    with ExitStack() as temporary:
        try:
            folder = temporary.enter_context(temporary_folder(PREFIX, parent))
        except OSError as error:
            raise ConfigError(f"{parent}: no temporary folder can be made there: {error.strerror}") from error
        yield os.path.join(folder, "root")


def _parent_for(root: str) -> str:
    parent = os.path.dirname(root)
    try:
        beside = os.stat(parent).st_dev
    except OSError as error:
        raise ConfigError(f"{root} cannot be reached: {parent}: {error.strerror}; mount the disk") from error
    try:
        here = os.stat(root).st_dev
    except OSError:
        return parent
    return parent if here == beside and os.access(parent, os.W_OK | os.X_OK) else root

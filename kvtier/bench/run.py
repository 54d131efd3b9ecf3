"""The whole measurement of a stack file: the copies at the layout's block size, then every root at several sizes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from kvtier.bench.copies import Blocks, Checked, Way, measure_copies, measure_memcpy
from kvtier.bench.figures import Figure, TierFigures
from kvtier.bench.lower import LowerTierBench
from kvtier.bench.moving import Timing
from kvtier.bench.places import folder_beside
from kvtier.config import StackConfig, build_tiers, tier_name
from kvtier.errors import ResourceError, UsageError
from kvtier.geometry import Geometry, GroupLayout, KVLayout, TensorRef, round_up
from kvtier.keys import CPU, GPU
from kvtier.loadstore import LoadStore, Opened, ProvidesRows, Rows, TierContext
from kvtier.namespace import Namespace
from kvtier.options import LowerTierOptions, TierOptions
from kvtier.registry import Backends, discover
from kvtier.stack.assembly import resolve_alignment

INFLIGHT_BYTES = 64 << 20
CAPACITY_FIXED_BYTES = 4 << 20
CAPACITY_SHARE = 1.1
SLOT_EXTRA_BYTES = 8192


@dataclass(frozen=True, slots=True)
class Bounds:
    """How much is measured: `seconds` of each figure, `num_bytes` of each tier at a time, other block sizes (bytes).

    `device` is where the KV tensors are, `seed` what the blocks' content comes from.
    """

    seconds: float
    num_bytes: int
    sizes: tuple[int, ...]
    device: str
    seed: int

    def to_json(self) -> dict[str, object]:
        """The bounds as they stand in the JSON document."""
        return {
            "seconds": self.seconds,
            "bytes": self.num_bytes,
            "sizes": list(self.sizes),
            "device": self.device,
            "seed": self.seed,
        }


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tier is measured: in places of its own beside these roots of the stack. `name` is for people."""

    name: str
    roots: tuple[str, ...]


class Bench:
    """Measures the tiers of one stack, one after another. Nothing that is stored in them is touched."""

    def __init__(self, config: StackConfig, layout: KVLayout, bounds: Bounds, backends: Backends | None = None) -> None:
        self._config = config
        self._layout = layout
        self._bounds = bounds
        self._backends = discover() if backends is None else backends

    async def run(self, progress: Callable[[str], None] = lambda what: None) -> list[TierFigures]:
        """The figures of every tier from the GPU down, several places of one tier one after another.

        `progress` is told what is measured next. Raises KVTierError if a tier cannot be opened or does not keep a
        block; what was made for the measurement is removed all the same.
        """
        alignment = await resolve_alignment(build_tiers(self._config, self._backends))
        progress("copies between GPU blocks and rows")
        found = await self._copies(Geometry(self._layout, alignment))
        for options in self._config.tiers:
            if self._medium(options) in (GPU, CPU):
                continue
            if "roots" not in type(options).model_fields:
                reason = "its options name no roots to make a place of its own beside"
                found.append(TierFigures(tier_name(options), self._medium(options), skipped=reason))
                continue
            for place in _places(options):
                found.append(await self._lower(options, place, alignment, progress))
        return found

    def _medium(self, options: TierOptions) -> Any:
        return self._backends.get(options.type).medium

    # -- the GPU and the CPU tier --------------------------------------------------------------------------------

    async def _copies(self, geometry: Geometry) -> list[TierFigures]:
        bounds = self._bounds
        blocks = Blocks(geometry, bounds.num_bytes, bounds.device, bounds.seed)
        gpu, cpu = self._gpu(), self._cpu(blocks.num_rows * geometry.row_bytes)
        async with AsyncExitStack() as closing:
            started = time.perf_counter()
            opened = await self._open(cpu, geometry, closing, workers=[gpu])
            populated = Timing(seconds=time.perf_counter() - started, moved_bytes=opened.capacity_bytes)
            rows = _rows(cpu)
            gpu_opened = await self._open(gpu, geometry, closing, kv_caches=blocks.kv_caches, rows=rows)
            found = []
            for tier, about, way in (
                (gpu, gpu_opened, Way(gpu.load, gpu.store, ("to_rows", "to_GPU"))),
                (cpu, opened, Way(cpu.store, cpu.load, ("store", "load"))),
            ):
                checked = Checked()
                figures = await measure_copies(blocks, rows, way, bounds.seconds, checked)
                if tier is cpu:
                    figures.append(Figure("populate", 0, populated))
                    figures.append(Figure("memcpy", 0, measure_memcpy(rows, bounds.seconds)))
                found.append(self._figures(tier, about, "", figures))
                found[-1].wrong_blocks, found[-1].checked_blocks = checked.wrong, checked.blocks
        return found

    def _gpu(self) -> LoadStore:
        options = next((one for one in self._config.tiers if self._medium(one) == GPU), None)
        backend = self._backends.get(options.type if options else "gpu")
        return backend(options or backend.Options(type="gpu"))

    def _cpu(self, num_bytes: int) -> LoadStore:
        """The stack's CPU tier with other bytes, of this process alone."""
        options = next(one for one in self._config.tiers if self._medium(one) == CPU)
        alone = "auto" if self._layout.world_size == 1 else "memfd"
        return self._with(options, {"cpu_bytes_to_use": num_bytes, "shared": alone})

    # -- the tiers below -----------------------------------------------------------------------------------------

    async def _lower(
        self, options: TierOptions, place: _Place, alignment: int, progress: Callable[[str], None]
    ) -> TierFigures:
        whole = Geometry(self._layout, alignment)
        own = whole.row_bytes
        sizes = sorted({own, *(round_up(size, alignment) for size in self._bounds.sizes)})
        result: TierFigures | None = None
        for size in sizes:
            progress(f"{tier_name(options)}, {place.name}, blocks of {size >> 10} KiB")
            geometry = Geometry(KVLayout((GroupLayout((TensorRef(0, size),)),)), alignment)
            found = await self._lower_at(options, place, geometry, size == own)
            if result is None:
                result = found
            else:
                result.figures += found.figures
                result.wrong_blocks += found.wrong_blocks
                result.checked_blocks += found.checked_blocks
        assert result is not None
        return result

    async def _lower_at(self, options: TierOptions, place: _Place, geometry: Geometry, own: bool) -> TierFigures:
        """One tier in one place at one block size, on a region of rows of its own."""
        bounds, row = self._bounds, geometry.row_bytes
        num_rows = max(1, bounds.num_bytes // row)
        capacity = int(num_rows * (row + SLOT_EXTRA_BYTES) * CAPACITY_SHARE) + CAPACITY_FIXED_BYTES * len(place.roots)
        capacity += row * len(place.roots)
        inflight = options.inflight_bytes if isinstance(options, LowerTierOptions) else INFLIGHT_BYTES
        cpu = self._cpu(num_rows * row)
        async with AsyncExitStack() as closing:
            roots = [closing.enter_context(folder_beside(root)) for root in place.roots]
            changed = {"roots": roots, "capacity": capacity, "region_bytes": None, "index_bytes_max": None}
            tier = self._with(options, changed)
            await self._open(cpu, geometry, closing)
            opened = await self._open(tier, geometry, closing, rows=_rows(cpu))
            bench = LowerTierBench(tier, opened, _rows(cpu), bounds.seed)
            try:
                figures = await bench.measure(bounds.seconds, inflight, self._bytes_per_token(geometry) if own else 0.0)
            except ResourceError as error:
                raise ResourceError(f"tier {tier_name(options)}, {place.name}: {error}") from error
        result = self._figures(tier, opened, place.name, figures)
        result.wrong_blocks, result.checked_blocks = bench.wrong, bench.checked
        return result

    def _bytes_per_token(self, geometry: Geometry) -> float:
        """What a lower tier moves for one token of the layout, all groups together."""
        whole = Geometry(self._layout, geometry.alignment)
        groups = range(whole.num_groups)
        return sum(whole.aligned_bytes(group) / whole.tokens_per_offloaded_block(group) for group in groups)

    # -- both ----------------------------------------------------------------------------------------------------

    def _with(self, options: TierOptions, update: dict[str, Any]) -> LoadStore:
        """A tier with some options changed, those of them that it has."""
        known = {name: value for name, value in update.items() if name in type(options).model_fields}
        return self._backends.get(options.type)(options.model_copy(update=known))

    async def _open(self, tier: LoadStore, geometry: Geometry, closing: AsyncExitStack, **more: Any) -> Opened:
        name = tier_name(tier.options)
        namespace = Namespace(geometry.layout, model="kvtier-bench")
        closing.push_async_callback(tier.close)
        return await tier.open(TierContext(name, geometry, namespace, time.monotonic, **more))

    @staticmethod
    def _figures(tier: LoadStore, opened: Opened, place: str, figures: list[Figure]) -> TierFigures:
        return TierFigures(tier_name(tier.options), tier.medium, place, opened.mode, opened.notes, figures)


def _places(options: TierOptions) -> Iterator[_Place]:
    """Each root alone, then all of them together."""
    roots: list[str] = getattr(options, "roots", [])
    for root in roots:
        yield _Place(root, (root,))
    if len(roots) > 1:
        yield _Place(f"{len(roots)} roots together", tuple(roots))


def _rows(cpu: LoadStore) -> Rows:
    if not isinstance(cpu, ProvidesRows):
        raise UsageError("the cpu tier provides no rows")
    return cpu.rows

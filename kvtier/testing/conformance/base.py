"""The base of conformance tests: the hooks a subclass supplies, and an open tier of it."""

from __future__ import annotations

import hashlib
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from kvtier.testing.driver import Driver, TestRows
from kvtier.tier.contract import AnswersLookups, LoadStore, ProbesAlignment, TierContext
from kvtier.types.geometry import Geometry, GroupLayout, KVLayout, TensorRef
from kvtier.types.jobs import BlockStatus
from kvtier.types.keys import OffloadKey, make_key
from kvtier.types.namespace import Namespace

PLACE = "tier"
REFUSED = (BlockStatus.MISSING, BlockStatus.CORRUPT, BlockStatus.FAILED)
"""Outcomes of a load that found no right bytes."""


def make_keys(count: int, group: int = 0, start: int = 0) -> list[OffloadKey]:
    """Distinct keys of a group, with hashes as engines make them."""
    return [make_key(hashlib.sha256(f"block {start + i}".encode()).digest(), group) for i in range(count)]


class ConformanceBase(ABC):
    """The hooks. `make` is required; the rest has defaults that suit most tiers.

    The tier must have room for `num_rows` blocks of each group of the layout, all at once.
    """

    survives_reopen: ClassVar[bool] = False
    """True if what was stored is found again by a new tier at the same place after a clean close."""

    num_rows: ClassVar[int] = 16
    """Rows of the region the tests work with."""

    layout: ClassVar[KVLayout] = KVLayout(
        (
            GroupLayout((TensorRef(0, 1500), TensorRef(1, 33))),
            GroupLayout((TensorRef(2, 4096),)),
            GroupLayout((TensorRef(3, 100),)),
        ),
        world_size=2,
        block_size_factor=2,
    )
    """Groups of several sizes, with padding and without."""

    machine_examples: ClassVar[int] = 15
    machine_steps: ClassVar[int] = 30

    @abstractmethod
    def make(self, place: Path) -> LoadStore:
        """A new tier, not open. `place` is a path of this test alone, the same for every tier that is to find what
        the one before it left; nothing is there at first."""

    def damage(self, place: Path) -> bool:
        """Change at least one payload byte of every block stored at `place`; no tier is open there.

        Return True if that was done. By default the tier keeps nothing that could be damaged from outside.
        """
        return False

    # -- for the tests ---------------------------------------------------------------------------------------------

    def namespace(self) -> Namespace:
        """The namespace the tests work in."""
        return Namespace(self.layout, model="conformance", weights="1", dtype="uint8")

    def names(self, per_group: int, start: int = 0) -> list[OffloadKey]:
        """Keys of every group, the same number of each, the groups one after another."""
        groups = range(len(self.layout.groups))
        return [key for group in groups for key in make_keys(per_group, group, start)]

    @property
    def per_group(self) -> int:
        """Blocks of each group that fill the rows together."""
        return self.num_rows // len(self.layout.groups)

    async def context(self, tier: LoadStore, namespace: Namespace | None = None, factor: int = 1) -> TierContext:
        """The context that a stack would hand the tier; its alignment is `factor` times the tier's own."""
        probed = await tier.probe_alignment() if isinstance(tier, ProbesAlignment) else 1
        namespace = namespace or self.namespace()
        geometry = Geometry(namespace.layout, max(tier.BLOCK_SIZE_ALIGNMENT, probed) * factor)
        rows = TestRows(self.num_rows, geometry.row_bytes)
        return TierContext("under test", geometry, namespace, time.monotonic, rows=rows)

    @asynccontextmanager
    async def opened(self, path: Path, namespace: Namespace | None = None, factor: int = 1) -> AsyncIterator[Driver]:
        """A tier at a test's place, open, with the stand-in for the control plane above it; closed at the end."""
        tier = self.make(path / PLACE)
        context = await self.context(tier, namespace, factor)
        assert isinstance(context.rows, TestRows)
        try:
            yield Driver(tier, await tier.open(context), context, context.rows)
        finally:
            await tier.close()

    def is_shared(self, path: Path) -> bool:
        """True for a tier whose backend places and evicts."""
        return isinstance(self.make(path / PLACE), AnswersLookups)

    def other_namespaces(self) -> list[Namespace]:
        """Namespaces that differ from the tests' own in one field each."""
        own = self.namespace()
        changed = {
            "model": "other",
            "weights": "2",
            "dtype": "int8",
            "hash_algorithm": "x",
            "hash_seed": "1",
            "tag": "t",
        }
        others = [replace(own, **{name: value}) for name, value in changed.items()]  # type: ignore[arg-type]
        group = replace(self.layout.groups[0], block_size=self.layout.groups[0].block_size + 1)
        layout = replace(self.layout, groups=(group, *self.layout.groups[1:]))
        return [*others, replace(own, extra={"attention": "other"}), replace(own, layout=layout)]

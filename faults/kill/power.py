"""Reset, then the power fails after every single write: whatever was not flushed, nothing older comes back.

Runs in the attack's own process, on the recorder that the tests of power loss use: every write, flush and rename of a
session is noted, and the images that a power loss at each moment may leave are opened.
"""

from __future__ import annotations

import asyncio
import random
import shutil
from pathlib import Path

from support_fs import Tier, bytes_on_disk, flat, keys, layout, open_tier, options
from support_fs_power import Recorder, put

from kvtier.types.jobs import BlockStatus

from ..attack import Tally

CAPACITY = 1 << 20
SHAPE = layout(4096)
OLD, LATER, NEW, NEXT = keys(6), keys(4, start=100), keys(4, start=200), keys(2, start=300)


class PowerLoss:
    """The row "reset, then power loss". An iteration is an image that was opened."""

    def __init__(self, folder: Path, seed: int, tally: Tally) -> None:
        self.folder, self.tally = folder, tally
        self._rng = random.Random(f"power {seed}")

    def run(self, rounds: int) -> None:
        """So many sessions, every second one on a root that is new, each ended at every moment."""
        for number in range(rounds):
            recorder, reset = asyncio.run(self._session(number % 2 == 0))
            for moment in range(len(recorder.events) + 1):
                for image in recorder.images(moment, self._rng):
                    asyncio.run(self._open(image, moment >= reset))
            self.tally.notes["moments"] += len(recorder.events) + 1
            shutil.rmtree(self.folder / "session")

    async def _session(self, old: bool) -> tuple[Recorder, int]:
        """Open, store, reset, store, close, all of it recorded. Returns also after how many events the reset held."""
        root = self.folder / "session"
        settings = options(root, capacity=CAPACITY)
        if old:
            async with open_tier(settings, SHAPE) as tier:
                await tier.store_all(OLD)
        recorder = Recorder(root)
        async with open_tier(settings, SHAPE, hooks=recorder.hooks()) as tier:
            await tier.store_all(LATER)
            await tier.backend.reset(1)
            reset = len(recorder.events)
            tier.epoch = 1
            tier.directory.clear()
            await tier.store_all(NEW)
        return recorder, reset

    async def _open(self, image: dict[str, bytes], was_reset: bool) -> None:
        """Open what a power loss left, and compare all that it says it has."""
        root, tally = self.folder / "after", self.tally
        put(image, root)
        async with open_tier(options(root, capacity=CAPACITY), SHAPE) as tier:
            found = list(tier.opened.recovered.keys)
            back = set(found) & {*OLD, *LATER}
            if was_reset and (back or tier.opened.epoch != 1):
                tally.wrong_bytes += 1
                tally.expect(False, f"{len(back)} blocks from before a reset, epoch {tier.opened.epoch}")
            tally.notes["blocks from before a reset that did not hold"] += 0 if was_reset else len(back)
            await self._compare(tier, found)
            await tier.store_all(NEXT)
        over = bytes_on_disk(root) - CAPACITY
        tally.over_bound += over > 0
        tally.expect(over <= 0, f"{over} bytes over the bound")
        tally.iterations += 1
        shutil.rmtree(root)

    async def _compare(self, tier: Tier, found: list) -> None:  # type: ignore[type-arg]
        for start in range(0, len(found), tier.rows.num_rows):
            names = found[start : start + tier.rows.num_rows]
            outcomes = flat(await tier.backend.load(tier.load_job(names)))
            for row, (key, outcome) in enumerate(zip(names, outcomes, strict=True)):
                if outcome.ok and not tier.holds(row, key, tier.directory[key][1]):
                    self.tally.wrong_bytes += 1
                    self.tally.expect(False, f"wrong bytes under {key.hex()}")
                self.tally.notes["blocks compared"] += outcome.ok
                self.tally.notes["blocks refused"] += outcome.status is BlockStatus.CORRUPT

"""A whole stack on a shared root, driven by lines; run as a process of its own by tests.

`python support_files_stack.py ROOT CAPACITY`: `store A N`, `load A N`, `find A N`, `reset`, `churn SEED ROUNDS`.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections import Counter
from pathlib import Path

from support_stack import PLAIN, Engine, keys, load, running, shared_fs, stack_file, statuses, store, whole

from kvtier.stack import TierStack
from kvtier.tier.contract import LookupResult

GPU_BLOCKS = 64
ROWS = 48
POOL = 400


def stack_on(root: Path, capacity: int):
    """A stack of a small CPU tier over a shared_fs tier."""
    engine = Engine(PLAIN, GPU_BLOCKS)
    config = stack_file(PLAIN, ROWS, shared_fs(root, capacity=capacity))
    return engine, running(config, engine)


class Driver:
    """What the lines ask for. Every loaded page is compared with what its key says it must hold."""

    def __init__(self, stack: TierStack, engine: Engine) -> None:
        self.stack = stack
        self.engine = engine

    async def store(self, start: int, count: int) -> Counter[str]:
        return Counter(statuses(await store(self.stack, self.engine, whole(keys(count, start=start)))))

    async def load(self, start: int, count: int) -> Counter[str]:
        self.engine.wipe()
        return Counter(statuses(await load(self.stack, self.engine, whole(keys(count, start=start)))))

    async def find(self, start: int, count: int) -> Counter[str]:
        found = await self.stack.lookup(keys(count, start=start))
        return Counter("hit" if one is not LookupResult.MISS else "miss" for one in found)

    async def reset(self) -> Counter[str]:
        await self.stack.reset()
        return Counter()

    async def churn(self, seed: int, rounds: int) -> Counter[str]:
        """Random prefixes out of a pool larger than the root: loaded as far as they are there, stored where not."""
        rng, ended = random.Random(seed), Counter[str]()
        for _ in range(rounds):
            start, count = rng.randrange(POOL), rng.randint(1, 32)
            ended += Counter({f"load {status}": n for status, n in (await self.load(start, count)).items()})
            ended += Counter({f"store {status}": n for status, n in (await self.store(start, count)).items()})
        return ended


async def main() -> None:
    root, capacity = Path(sys.argv[1]), int(sys.argv[2])
    engine, opening = stack_on(root, capacity)
    loop = asyncio.get_running_loop()
    async with opening as stack:
        driver = Driver(stack, engine)
        print("open", flush=True)
        while words := (await loop.run_in_executor(None, sys.stdin.readline)).split():
            ended = await getattr(driver, words[0])(*map(int, words[1:]))
            print(json.dumps(ended), flush=True)


if __name__ == "__main__":
    asyncio.run(main())

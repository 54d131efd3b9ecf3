"""A host of one release in a process of its own: commands come as lines of JSON, and so do the answers.

It runs under the release that is first on PYTHONPATH, so it uses nothing that releases do not share.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
from typing import Any

import torch

import kvtier

PAGE, COUNT = 4096, 8
NAMES = kvtier.block_keys([hashlib.sha256(f"prompt {i}".encode()).digest() for i in range(COUNT)])


class Host:
    """One stack at a time."""

    def __init__(self) -> None:
        self.stack_file = ""
        self.kv = torch.zeros(2 * COUNT, PAGE, dtype=torch.uint8)
        self.stack: Any = None

    async def use(self, stack_file: str) -> None:
        """Open this one from now on."""
        self.stack_file = stack_file

    async def open(self) -> str:
        layout = kvtier.KVLayout.of_pages(PAGE)
        self.stack = kvtier.open_stack(kvtier.parse_stack(self.stack_file), layout, [self.kv], model="demo")
        await self.stack.__aenter__()
        return kvtier.__file__

    async def close(self) -> int:
        corrupt = sum(tier.corrupt for tier in self.stack.stats().tiers.values())
        await self.stack.__aexit__(None, None, None)
        self.stack = None
        return corrupt

    async def reset(self) -> None:
        await self.stack.reset()

    async def store(self, weights: int) -> None:
        self.kv[:COUNT] = weights
        await self.stack.store(NAMES, gpu_blocks=range(COUNT))
        await self.stack.drain(30.0)

    async def load(self) -> list[int]:
        self.kv[:] = 255
        await self.stack.lookup(NAMES)
        result = await self.stack.load(NAMES, gpu_blocks=range(COUNT))
        return [int(self.kv[i, 0]) for i, outcome in enumerate(result.outcomes[0]) if outcome.ok]


async def serve() -> None:
    """Answer commands until there are no more."""
    host = Host()
    while line := await asyncio.to_thread(sys.stdin.readline):
        name, *arguments = json.loads(line)
        print(json.dumps(await getattr(host, name)(*arguments)), flush=True)


if __name__ == "__main__":
    asyncio.run(serve())

"""One life of a tier over a server that may lie, in a process of its own: how it ended, how long it took, its memory.

`python support_lying_life.py TYPE OPTIONS` prints that as a line of JSON; a defect ends it with a traceback.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from faults.machine import warm

CALLS_SECONDS = 1.0
"""`request_timeout_seconds` of these tiers; a job has four times as much, an opening forty times."""
LIFE_SECONDS = 60.0
"""What all calls of a life may take together, on a slow machine."""
MEMORY_BYTES = 256 << 20
"""More than a life over an honest server takes a lie may not cost."""


@dataclass(frozen=True, slots=True)
class Ended:
    """What became of the opening, of a store, a load, a lookup and a reset; the last where it raised."""

    calls: list[str]
    seconds: float
    peak_bytes: int


def life_over(options: Any) -> Ended:
    """A life of a tier of these options. Raises AssertionError with its output if it ended in a defect."""
    given = options.model_dump(mode="json") | {
        "request_timeout_seconds": CALLS_SECONDS,
        "job_timeout_seconds": 4 * CALLS_SECONDS,
    }
    from support_lying_http import KEYS

    done = warm.run(
        [sys.executable, __file__, json.dumps(given)],
        capture_output=True,
        text=True,
        timeout=4 * LIFE_SECONDS,
        env=os.environ | KEYS,
        check=False,
    )
    assert done.returncode == 0, f"status {done.returncode}: {done.stdout}\n{done.stderr}"
    return Ended(**json.loads(done.stdout.splitlines()[-1]))


async def _life(suite: Any, calls: list[str]) -> None:
    from kvtier.errors import KVTierError
    from kvtier.testing.conformance import make_keys

    names = [*make_keys(3, 0), *make_keys(3, 1)]
    try:
        async with asyncio.timeout(LIFE_SECONDS), suite.opened(Path()) as driver:
            calls.append("opened")
            for call in (driver.store, driver.load):
                calls.append(" ".join(sorted({str(one.status) for one in (await call(names)).values()})))
            calls.append(" ".join(sorted({str(found) for found in await driver.tier.lookup(names)})))
            await driver.tier.reset(1)
            calls.append("reset")
            assert "defect" not in driver.tier.counters, driver.tier.counters
    except KVTierError as error:
        calls.append(type(error).__name__)


def main() -> None:
    from support_remote_blocks import TWO_SIZES

    from kvtier.testing.conformance.base import ConformanceBase
    from kvtier_remote import S3Backend, S3Options, ValkeyBackend, ValkeyOptions

    given = json.loads(sys.argv[1])
    kinds = {"valkey": (ValkeyBackend, ValkeyOptions), "s3": (S3Backend, S3Options)}

    class Blocks(ConformanceBase):
        layout = TWO_SIZES

        def make(self, place: Path) -> Any:
            backend, options = kinds[given["type"]]
            return backend(options.model_validate(given))

    calls: list[str] = []
    begun = time.monotonic()
    asyncio.run(_life(Blocks(), calls))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps(asdict(Ended(calls, time.monotonic() - begun, peak))), flush=True)
    os._exit(0)  # a thread of obstore that ends beside the interpreter aborts the process now and then


if __name__ == "__main__":
    main()

"""The code that a serving stack loads: modules of kvtier's packages, and their lines, after one trip of everything.

    python -m benchmarks.loaded [--json FILE]

A process of its own opens a stack of the tiers `cpu` and `fs`, once with `lru` and once with `reuse`. It stores until
blocks are evicted from both tiers, loads from disk, gives a hint, reads the figures, resets and closes. Then the lines
of the files of `kvtier` and `kvtier_*` in `sys.modules` are counted.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import click

from benchmarks.options import JSON_FILE

POLICIES = ("lru", "reuse")
ROWS, BLOCK_BYTES, DISK_BYTES = 16, 4096, 1 << 20
TRIP_SECONDS = 60


async def trip(policy: str, folder: str) -> None:
    """Use everything that serves of a stack. Raises AssertionError where a block does not come back."""
    import torch

    import kvtier

    blocks = torch.arange(8, dtype=torch.uint8).repeat_interleave(BLOCK_BYTES).reshape(8, BLOCK_BYTES)
    namespace = kvtier.Namespace(kvtier.KVLayout.of_pages(BLOCK_BYTES, block_size=16), model="benchmark")
    config = kvtier.parse_stack(
        f"tiers:\n  - type: gpu\n  - {{type: cpu, cpu_bytes_to_use: {ROWS * BLOCK_BYTES}, policy: {policy}}}\n"
        f"  - {{type: fs, roots: [{folder}], capacity: {DISK_BYTES}, min_free_bytes: 0, policy: {policy}}}\n"
    )
    async with kvtier.open_stack(config, namespace, [blocks]) as stack:
        requests = [kvtier.block_keys([f"{number}/{i}".encode() for i in range(4)], 0) for number in range(128)]
        for number, keys in enumerate(requests):
            with stack.request(kvtier.RequestId(str(number)), keys):
                await stack.lookup(keys)
                assert (await stack.store(keys, gpu_blocks=range(4))).ok
            assert await stack.drain(TRIP_SECONDS)
        on_disk = next(keys for keys in reversed(requests) if set(stack.locate(keys)) == {"fs"})
        assert (await stack.load(on_disk, gpu_blocks=range(4, 8))).ok
        assert torch.equal(blocks[:4], blocks[4:])
        stack.hint(kvtier.Prefetch(on_disk))
        assert all(tier.evictions for tier in stack.stats().tiers.values())
        await stack.reset()


def print_loaded(policy: str, folder: str) -> None:
    """Make the trip, and print the lines of each module of kvtier's packages that this process has loaded, as JSON."""
    asyncio.run(trip(policy, folder))
    files = {name: getattr(module, "__file__", None) for name, module in sys.modules.items()}
    ours = {name: Path(file) for name, file in files.items() if file and name.split(".")[0].split("_")[0] == "kvtier"}
    print(json.dumps({name: file.read_bytes().count(b"\n") for name, file in ours.items() if file.suffix == ".py"}))


def measure(policy: str) -> dict[str, int]:
    """The lines of each module that a fresh process has loaded after the trip."""
    with tempfile.TemporaryDirectory() as folder:
        code = f"from benchmarks.loaded import print_loaded; print_loaded({policy!r}, {folder!r})"
        done = subprocess.run(
            [sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, timeout=4 * TRIP_SECONDS
        )
    found: dict[str, int] = json.loads(done.stdout)
    return found


@click.command()
@JSON_FILE
def main(json_file: Path | None) -> None:
    """Count the modules and lines that a serving stack loads."""
    from benchmarks.report import Report, table

    report = Report("loaded", {"rows": ROWS, "block_bytes": BLOCK_BYTES})
    report.head()
    for policy in POLICIES:
        lines = measure(policy)
        rooms: Counter[str] = Counter()
        for name, count in lines.items():
            rooms[".".join(name.split(".")[:2])] += count
        report.results.append({"policy": policy, "modules": len(lines), "lines": rooms.total(), **rooms})
        report.notes.append(f"{policy}: " + ", ".join(f"{room} {count}" for room, count in rooms.most_common()))
    report.verified = True
    table(
        "loaded",
        ("policy", "modules", "lines"),
        [[row["policy"], row["modules"], row["lines"]] for row in report.results],
    )
    report.end(json_file)


if __name__ == "__main__":
    main()

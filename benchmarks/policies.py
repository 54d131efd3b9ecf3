"""What an eviction policy costs: nanoseconds a slot in batches, bytes a slot, and hit rates on a trace.

    python -m benchmarks.policies [--slots N] [--trace FILE] [POLICY ...]

One core, the policy alone: a full tier, every cycle admits, evicts, inserts and touches one batch of new keys. The
trace is one that `kvtier replay --trace` reads; blocks of a request are used one by one from leaf to root.
"""

from __future__ import annotations

import tracemalloc
from itertools import count
from pathlib import Path
from time import perf_counter_ns

import click

from kvtier.control.policies import POLICIES, make_policy
from kvtier.traces.read import read_lines
from kvtier.types.keys import OffloadKey, make_key

STEPS = ("admit", "evict", "insert", "touch")


def cost_ns(name: str, num_slots: int, batch: int) -> dict[str, float]:
    """Nanoseconds a slot of each call, over as many cycles as refill the tier twice."""
    numbers = count()
    keys: list[OffloadKey | None] = [make_key(next(numbers).to_bytes(32, "big"), 0) for _ in range(num_slots)]
    policy = make_policy(name, num_slots, keys)
    policy.insert(range(num_slots))
    holds = bytearray(num_slots)
    spent = dict.fromkeys(STEPS, 0)
    cycles = 2 * num_slots // batch
    for _ in range(cycles):
        fresh = [make_key(next(numbers).to_bytes(32, "big"), 0) for _ in range(batch)]
        start = perf_counter_ns()
        policy.admit(fresh)
        admitted = perf_counter_ns()
        slots = policy.evict(batch, holds)
        evicted = perf_counter_ns()
        if slots is None:
            raise SystemExit(f"{name} evicted nothing although nothing is held")
        for slot, key in zip(slots, fresh, strict=True):
            keys[slot] = key
        placed = perf_counter_ns()
        policy.insert(slots)
        inserted = perf_counter_ns()
        policy.touch(slots)
        touched = perf_counter_ns()
        took = (admitted - start, evicted - admitted, inserted - placed, touched - inserted)
        for step, nanoseconds in zip(STEPS, took, strict=True):
            spent[step] += nanoseconds
    return {step: total / (cycles * batch) for step, total in spent.items()}


def bytes_per_slot(name: str, num_slots: int) -> float:
    """Bytes a slot a policy allocates for itself, with every slot and every ghost in use."""
    keys: list[OffloadKey | None] = [make_key(i.to_bytes(32, "big"), 0) for i in range(num_slots)]
    tracemalloc.start()
    policy = make_policy(name, num_slots, keys)
    policy.insert(range(num_slots))
    policy.evict(num_slots, bytearray(num_slots))
    policy.insert(range(num_slots))
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return used / num_slots


def hit_rate(name: str, num_slots: int, requests: list[list[OffloadKey]]) -> float:
    """Hits (longest resident prefixes) over block references in one tier."""
    keys: list[OffloadKey | None] = [None] * num_slots
    policy = make_policy(name, num_slots, keys)
    slots: dict[OffloadKey, int] = {}
    free, holds, hits = list(range(num_slots)), bytearray(num_slots), 0
    for request in requests:
        hits += next((i for i, key in enumerate(request) if key not in slots), len(request))
        for key in reversed(request):
            if key in slots:
                policy.touch((slots[key],))
                continue
            policy.admit((key,))
            if not free:
                free = policy.evict(1, holds) or []
                gone = keys[free[0]]
                if gone is not None:
                    del slots[gone]
            slot = free.pop()
            keys[slot], slots[key] = key, slot
            policy.insert((slot,))
    return hits / sum(map(len, requests))


@click.command()
@click.argument("names", nargs=-1, type=click.Choice(sorted(POLICIES)), metavar="[POLICY]...")
@click.option("--slots", default=200_000, show_default=True, help="slots of the tier whose calls are timed")
@click.option("--trace", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="also print hit rates")
def main(names: tuple[str, ...], slots: int, trace: Path | None) -> None:
    """Print what eviction policies cost and, with a trace, what they hit."""
    for name in names or sorted(POLICIES):
        click.echo(f"{name}: {bytes_per_slot(name, slots):.1f} bytes a slot")
        for batch in (32, 1000):
            cost = cost_ns(name, slots, batch)
            steps = "  ".join(f"{step} {cost[step]:5.0f}" for step in STEPS)
            click.echo(
                f"  batches of {batch:4}, ns a slot: {steps}  evict + insert {cost['evict'] + cost['insert']:5.0f}"
            )
    if trace is not None:
        requests = [[make_key(i.to_bytes(16, "big"), 0) for i in line.ids.tolist()] for line in read_lines(trace)]
        for name in names or sorted(POLICIES):
            rates = "  ".join(f"{size:,}: {hit_rate(name, size, requests):.4f}" for size in (8_000, 16_000, 32_000))
            click.echo(f"{name} hits  {rates}")


if __name__ == "__main__":
    main()

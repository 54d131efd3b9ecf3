"""What an eviction policy costs: nanoseconds a slot in batches, bytes a slot, and hit rates on a trace.

    python -m benchmarks.policies [--slots N] [--trace FILE [--size N ...] [--first N ...]] [POLICY ...]
    python -m benchmarks.policies --trace FILE --split SEED [POLICY ...]
    python -m benchmarks.policies --trace FILE --learned-from OTHER [--lives N] reuse

One core, the policy alone: a full tier, every cycle admits, evicts, inserts and touches one batch of new keys. The
trace is one that `kvtier replay --trace` reads; a request is used as a whole, and its last block, if it is not full, is
not stored but counts. The CPU seconds behind a hit rate include the tier around the policy.

With `--split` the sessions of the trace are divided at random into two halves. Each half is a trace: its sessions begin
in random order, a mean of 300 s apart. Rules are chosen on the first halves; the second ones are for the report.

With `--learned-from` policies start with what they learn on another trace in a tier of the largest size, `--lives` of
that: does it help a stack that is new, and is it unlearned where it is wrong?
"""

from __future__ import annotations

import random
import tracemalloc
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import count
from pathlib import Path
from time import perf_counter_ns, process_time
from typing import Any

import click

from kvtier.policy import POLICIES, RequestModels, RequestPolicy, make_policy
from kvtier.policy.reuse.prediction.model import ReuseModel
from kvtier.traces.read import read_trace
from kvtier.traces.requests import KeyChain, Request, group_keys
from kvtier.types.keys import GroupIndex, OffloadKey, RequestId, make_key
from kvtier.types.requests import RequestUse

STEPS = ("admit", "evict", "insert", "touch")
SIZES = (4_000, 8_000, 16_000, 32_000)
TRACE = click.Path(exists=True, dir_okay=False, path_type=Path)
OUTPUT_RATE = 50.0
"""Tokens a second that a request is taken to generate: it ends, and its output is known, so much later."""

SESSION_GAP_SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class TimedRequest:
    """A request: when it came, the keys of its full blocks, and how many blocks it has with a partial one."""

    time: float
    keys: list[OffloadKey]
    blocks: int
    output_tokens: int


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


class OneTier:
    """A tier without bytes: requests are atomic, and nothing is pinned or in flight.

    As in a stack, what was here is used again once the rest of its prompt is placed: it is not older than its children.
    """

    def __init__(self, name: str, num_slots: int) -> None:
        self.keys: list[OffloadKey | None] = [None] * num_slots
        self.models = RequestModels((name,))
        self.policy = make_policy(name, num_slots, self.keys, self.models)
        self.slots: dict[OffloadKey, int] = {}
        self.free = list(range(num_slots))
        self.pins = bytearray(num_slots)
        self.ends: list[tuple[float, RequestId, int]] = []

    def serve(self, number: int, request: TimedRequest) -> int:
        """The hits of a request: the blocks of its prefix that are here. Then what is missing is stored."""
        slots = [self.slots.get(key, -1) for key in request.keys]
        self._begin(RequestId(str(number)), request, slots)
        held = [slot for slot in slots if slot >= 0]
        missing = [key for key, slot in zip(request.keys, slots, strict=True) if slot < 0]
        self._store(missing[: len(self.keys) - len(held)])
        named = zip(reversed(request.keys), reversed(slots), strict=True)
        self.policy.renew([slot for key, slot in named if slot >= 0 and self.slots.get(key) == slot])
        return slots.index(-1) if -1 in slots else len(slots)

    def _begin(self, request_id: RequestId, request: TimedRequest, slots: list[int]) -> None:
        policy = self.policy
        if not isinstance(policy, RequestPolicy):
            policy.touch([slot for slot in reversed(slots) if slot >= 0])
            return
        while self.ends and self.ends[0][0] <= request.time:
            _, ended, tokens = heappop(self.ends)
            policy.end_request(ended, tokens)
        use = RequestUse(request_id, request.time, request.keys, GroupIndex(0), slots.count(-1))
        for model in self.models:
            model.advance(request.time)
            model.begin_request(use)
        policy.begin_request(use, slots)
        heappush(self.ends, (request.time + request.output_tokens / OUTPUT_RATE, request_id, request.output_tokens))

    def _store(self, missing: list[OffloadKey]) -> None:
        need = len(missing) - len(self.free)
        asked = need > 0 and isinstance(self.policy, RequestPolicy)
        if asked and (bypassed := set(self.policy.bypass(missing, need, self.pins))):
            missing = [key for index, key in enumerate(missing) if index not in bypassed]
            need = len(missing) - len(self.free)
        self.policy.admit(missing[::-1])
        for slot in (self.policy.evict(need, self.pins) or ()) if need > 0 else ():
            gone = self.keys[slot]
            if gone is not None:
                del self.slots[gone]
            self.free.append(slot)
        placed = [self.free.pop() for _ in missing]
        for slot, key in zip(placed, missing, strict=True):
            self.keys[slot], self.slots[key] = key, slot
        self.policy.insert(placed[::-1])


def timed_requests(trace: Path) -> list[TimedRequest]:
    """The requests of a trace with the keys of their full blocks; a time that goes back goes on from the last one."""
    source, chain, time, ahead = read_trace(trace), KeyChain(), 0.0, 0.0
    requests = []
    for request in source.requests():
        arrived = request.arrived or 0.0
        ahead = max(ahead, time - arrived)
        time = arrived + ahead
        requests.append(_timed(request, source.block_tokens, chain, time))
    return requests


def _timed(request: Request, block_tokens: int, chain: KeyChain, time: float) -> TimedRequest:
    full = min(request.prompt_blocks, request.prompt_tokens // block_tokens)
    keys = list(group_keys(chain.digests(request)[:full], 0))
    return TimedRequest(time, keys, request.prompt_blocks, request.output_tokens)


def split_sessions(trace: Path, seed: int) -> tuple[list[TimedRequest], list[TimedRequest]]:
    """Two traces, each of half of the sessions, which begin `SESSION_GAP_SECONDS` apart in the mean."""
    source, chain, rng = read_trace(trace), KeyChain(), random.Random(seed)
    sessions: dict[str, list[TimedRequest]] = {}
    for request in source.requests():
        turns = sessions.setdefault(request.session, [])
        time = max(request.arrived or 0.0, turns[-1].time if turns else 0.0)
        turns.append(_timed(request, source.block_tokens, chain, time))
    names = list(sessions)
    rng.shuffle(names)
    half = len(names) // 2
    first, second = (_interleaved([sessions[name] for name in part], rng) for part in (names[:half], names[half:]))
    return first, second


def _interleaved(sessions: Sequence[Sequence[TimedRequest]], rng: random.Random) -> list[TimedRequest]:
    requests, begin = list[TimedRequest](), 0.0
    for turns in sessions:
        begin += rng.expovariate(1 / SESSION_GAP_SECONDS)
        requests += [replace(turn, time=begin + turn.time) for turn in turns]
    return sorted(requests, key=lambda request: request.time)


def hit_rates(
    name: str, num_slots: int, requests: list[TimedRequest], firsts: Sequence[int], learned: RequestModels
) -> tuple[list[float], float]:
    """Usable prefix hits over block references, partial ones too, in one tier; and the CPU seconds it took.

    One rate for each of `firsts`, over so many requests from the first on. The policy starts with what `learned` holds.
    """
    tier, start, rates, hits, blocks = OneTier(name, num_slots), process_time(), dict[int, float](), 0, 0
    for model, known in zip(tier.models, learned, strict=True):
        model.restore(known.save())
    for number, request in enumerate(requests[: max(firsts)]):
        hits += tier.serve(number, request)
        blocks += request.blocks
        rates[number + 1] = hits / blocks
    return [rates[min(first, len(requests))] for first in firsts], process_time() - start


def models_learned(name: str, num_slots: int, trace: Path | None, lives: float | None) -> RequestModels:
    """What a policy learns on a trace, scaled down to so many lives; its models as they begin, without a trace."""
    tier = OneTier(name, num_slots)
    for number, request in enumerate(timed_requests(trace) if trace else ()):
        tier.serve(number, request)
    learned = RequestModels((name,))
    for model, known in zip(learned, tier.models, strict=True):
        model.restore(known.save())
        if isinstance(model, ReuseModel) and lives is not None:
            tables = model.tables
            factor = lives / (sum(tables.ended) + sum(tables.cut))
            tables.ended = array("d", [factor * count for count in tables.ended])
            tables.cut = array("d", [factor * count for count in tables.cut])
    return learned


@click.command()
@click.argument("names", nargs=-1, type=click.Choice(sorted(POLICIES)), metavar="[POLICY]...")
@click.option("--slots", default=200_000, show_default=True, help="slots of the tier whose calls are timed")
@click.option("--trace", type=TRACE, help="also print hit rates")
@click.option("--size", "sizes", type=click.IntRange(1), multiple=True, default=SIZES, help="slots; may be repeated")
@click.option("--first", "firsts", type=click.IntRange(1), multiple=True, help="hits of the first N requests")
@click.option("--split", "seed", type=int, help="divide the sessions of the trace into two halves by this seed")
@click.option("--learned-from", type=TRACE, help="start with what is learned on this trace")
@click.option("--lives", type=click.FloatRange(1), help="scale what is learned there down to so many lives")
def main(names: tuple[str, ...], slots: int, trace: Path | None, seed: int | None, **options: Any) -> None:
    """Print what eviction policies cost and, with a trace, what they hit."""
    for name in names or sorted(POLICIES):
        click.echo(f"{name}: {bytes_per_slot(name, slots):.1f} bytes a slot")
        for batch in (32, 1000):
            cost = cost_ns(name, slots, batch)
            steps = "  ".join(f"{step} {cost[step]:5.0f}" for step in STEPS)
            click.echo(
                f"  batches of {batch:4}, ns a slot: {steps}  evict + insert {cost['evict'] + cost['insert']:5.0f}"
            )
    if trace is None:
        return
    for requests in (timed_requests(trace),) if seed is None else split_sessions(trace, seed):
        print_hits(names or sorted(POLICIES), requests, **options)


def print_hits(
    names: Sequence[str],
    requests: list[TimedRequest],
    sizes: Sequence[int],
    firsts: Sequence[int],
    learned_from: Path | None,
    lives: float | None,
) -> None:
    """A line for each policy and number of requests, with the rate at each size."""
    counts = firsts or (len(requests),)
    for name in names:
        learned = models_learned(name, max(sizes), learned_from, lives)
        found = [(size, *hit_rates(name, size, requests, counts, learned)) for size in sizes]
        for place, first in enumerate(counts):
            rates = "  ".join(f"{size:,}: {rates[place]:.4f} ({cpu:.1f} s)" for size, rates, cpu in found)
            click.echo(f"{name} hits of {first:,} requests  {rates}")


if __name__ == "__main__":
    main()

"""A watched serving loop does the work of one that is not watched, and says where each prompt came from."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

import pytest
from support_replay import FakeStack

from kvtier.planner import StoreMode
from kvtier.stack import TierStats
from kvtier.tools.replay.engine import EngineCache
from kvtier.tools.replay.run import Replay
from kvtier.tools.replay.serve import Counts, ReplayLoop, ServeOptions
from kvtier.tools.replay.setup import ReplayOptions, make_layout
from kvtier.tools.replay.timeline import COMPUTED, StackSnapshot, Timeline, WatchedLoop, watching
from kvtier.tools.replay.workload import make_workload
from kvtier.types.keys import OffloadKey

Prepare = Callable[[FakeStack], None]


def nothing(stack: FakeStack) -> None:
    """The stack as it is."""


def lossy(stack: FakeStack) -> None:
    """Of what lookups find, some is missing at load."""

    class Some(set[OffloadKey]):
        def __contains__(self, key: object) -> bool:
            return isinstance(key, bytes) and not key[0] % 4

    stack.lost = Some()


def served(workload: str, mode: StoreMode, prepare: Prepare, timeline: Timeline | None) -> tuple[Counts, FakeStack]:
    options = ReplayOptions(workload=workload, block_bytes=128)  # type: ignore[arg-type]
    source = make_workload(workload, 0, 60)
    layout = make_layout(options, source.block_tokens, None)
    engine = EngineCache(layout, source.longest_blocks + 40, "cpu", mode)
    stack = FakeStack(layout, engine.tensors)
    prepare(stack)
    chosen = ServeOptions(concurrency=2)
    server = ReplayLoop(engine, stack, chosen) if timeline is None else WatchedLoop(timeline, engine, stack, chosen)
    return asyncio.run(server.run(source.requests())), stack


@pytest.mark.parametrize("prepare", [nothing, lossy])
@pytest.mark.parametrize("mode", list(StoreMode))
@pytest.mark.parametrize("workload", ["chat", "hybrid"])
def test_parts_of_prompts_add_up_to_the_counts(workload: str, mode: StoreMode, prepare: Prepare) -> None:
    ticks = itertools.count()
    timeline = Timeline(lambda: float(next(ticks)), "virtual")
    counts, stack = served(workload, mode, prepare, timeline)
    alone, _ = served(workload, mode, prepare, None)
    assert (counts.hit_tokens, counts.loaded, counts.stored) == (alone.hit_tokens, alone.loaded, alone.stored)
    timeline.end(StackSnapshot({"gpu": TierStats(), **stack.stats().tiers}, 0), 1.0)
    found = timeline.to_json()
    sums = {name: sum(steps) for name, steps in found["tokens"].items()}
    assert {name: count for name, count in sums.items() if name != COMPUTED} == counts.hit_tokens
    assert sum(sums.values()) == counts.prompt_tokens
    assert (counts.load_failed > 0) == (prepare is lossy)
    assert sum(sum(request["failed"].values()) for request in found["requests"]) == counts.load_failed
    for number, request in enumerate(found["requests"], start=1):
        assert request["number"] == number
        assert sum(tokens for _, tokens in request["parts"]) == request["prompt_tokens"]
        assert request["parts"][-1][0] == COMPUTED
        assert {"lookup", "compute", "write_back"} <= request["phases"].keys()


def test_a_replay_without_a_timeline_is_not_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: object, *args: object) -> None:
        raise AssertionError("watched")

    monkeypatch.setattr(WatchedLoop, "__init__", refuse)
    monkeypatch.setattr(Timeline, "begin", refuse)
    replay = Replay(ReplayOptions(requests=3, block_bytes=128), lambda config, layout, kv: FakeStack(layout, kv))  # type: ignore[arg-type,return-value]
    assert asyncio.run(replay.run()).counts.requests == 3


def test_what_goes_wrong_while_watching_ends_the_replay() -> None:
    timeline = Timeline(lambda: 0.0, "real")

    def figures() -> StackSnapshot:
        raise ValueError("no figures")

    async def watched() -> None:
        before = asyncio.all_tasks()
        async with watching(timeline, figures):
            await asyncio.wait(asyncio.all_tasks() - before)

    with pytest.raises(ValueError, match="no figures"):
        asyncio.run(watched())

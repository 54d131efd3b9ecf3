"""kvtier's metrics on vLLM's page: every name for each Prometheus, from the start on, and true when nothing runs."""

from __future__ import annotations

import re

import pytest
from engines import BLOCK, SEED, engine, prompts, stack, total
from fake_engine import FakeEngine, offloading_config
from fake_engine import stack as small_stack
from support_pages import PROMETHEUS_2, PROMETHEUS_3, samples
from support_service import until

from kvtier.engines.vllm.metrics import Meter, counted
from kvtier.engines.vllm.primary import client_driver
from kvtier.metrics import DEFINITIONS
from kvtier.service.figures import EngineFigures
from kvtier.stack.watching.stats import StackStats, TierStats

pytestmark = pytest.mark.engine
WITHOUT_A_VALUE = {"kvtier_curve_missed_blocks_total"}
"""The stack has no curves."""


def test_figures_are_read_once_more_when_there_is_nothing_to_do(stacks, root, seed, monkeypatch):
    monkeypatch.setattr("kvtier.engines.vllm.metrics.INTERVAL_SECONDS", 1e6)
    monkeypatch.setattr(client_driver, "INTERVAL_SECONDS", 1e6)
    monkeypatch.setattr(client_driver, "IDLE_SECONDS", 1.0)  # in which the answer comes
    with FakeEngine(offloading_config(small_stack(root, 50)), seed) as vllm:
        assert vllm.manager.has_pending_work(), "the first reading is before the first request"
        vllm.step()
        told = vllm.told.data["data"]
        assert told["kvtier_block_errors_total"]["fs", "corrupt"] == 0
        assert told["kvtier_dropped_blocks_total"]["fs", "no_row"] == 0
        assert told["kvtier_transfer_seconds"]["fs", "load"] == []
        assert not vllm.manager.has_pending_work()
        for number in range(3):
            vllm.add([1, 2, 3, number])
            vllm.run()
        until(lambda: stacks.is_at_rest(vllm), "all is on disk")
        vllm.add([1, 2, 3, 0])
        vllm.run()  # what is written after the last step is in the figures of the next one
        stats = stacks.stats(vllm)
        assert told["kvtier_stored_blocks_total"] == {(name,): tier.stored for name, tier in stats.tiers.items()}
        assert told["kvtier_used_bytes"] == {(name,): tier.used_bytes for name, tier in stats.tiers.items()}
        assert len(told["kvtier_transfer_seconds"]["fs", "store"]) > 0
        assert told["kvtier_backlog_blocks"] == {(): 0}


def test_no_counter_is_increased_by_less_than_nothing():
    """Time in flight that is read as a transfer begins; vLLM would end by a negative increase."""
    stats = StackStats({"fs": TierStats(load_seconds=-1e-6, hits=3)}, 0)
    sent = [series for item in EngineFigures().changes(stats) for series in item.series]
    for changed in (Meter().read(lambda: stats), counted(sent)):
        metrics = changed.data["data"].values()
        counters = [value for metric in metrics for value in metric.values() if isinstance(value, float)]
        assert 3.0 in counters
        assert min(counters) >= 0


@pytest.mark.timeout(3600)
def test_vllms_page_has_every_name_for_each_prometheus_and_from_the_start_on(models, root, tmp_path, short_folder):
    tiers = stack(root, 600) | {"runtime_dir": short_folder}
    with engine(models["llama"], tmp_path, tiers) as vllm:
        fresh = samples(*vllm.page(PROMETHEUS_2))
        vllm.generate(prompts(SEED))
        pages = [vllm.page(accept) for accept in (PROMETHEUS_2, PROMETHEUS_3)]
        plain, _ = vllm.page("text/plain;version=0.0.4")
    corrupt = {labels: value for (name, labels), value in fresh.items() if name == "kvtier_block_errors_total"}
    known = {definition.name for definition in DEFINITIONS if not definition.of_engines}
    assert set(corrupt.values()) == {0.0}
    for text in (*(text for text, _ in pages), plain):
        described = re.findall(r"^# TYPE (kvtier_\w+)", text, re.MULTILINE)
        for name in known:
            assert {name, name.removesuffix("_total")} & set(described)
    found = [{(name, labels) for name, labels in samples(*page) if name.startswith("kvtier_")} for page in pages]
    assert found[0] == found[1] == {(n, labels) for n, labels in samples(plain, "") if n.startswith("kvtier_")}
    names = {re.sub("_(bucket|sum|count)$", "", name) for name, _ in found[0] if not name.endswith("_created")}
    assert names <= known
    assert known - names == WITHOUT_A_VALUE


@pytest.mark.timeout(3600)
def test_a_block_that_a_request_loads_is_one_hit_of_the_tier_that_had_it(models, root, tmp_path, short_folder):
    rows = 24
    prompt, *others = prompts(SEED, count=16, prefixes=16)
    whole = len(prompt) // BLOCK
    assert sum(len(other) // BLOCK for other in others) > 4 * rows, "a busy machine leaves some stores out"
    tiers = stack(root, rows) | {"runtime_dir": short_folder}
    with engine(models["llama"], tmp_path, tiers) as vllm:

        def hits() -> dict[str, float]:
            told = vllm.metrics()
            return {tier: total(told, "kvtier_hit_blocks_total", f"tier={tier}") for tier in ("cpu", "fs")}

        computed = vllm.generate([prompt]).tokens
        for other in others:
            vllm.generate([other], tokens=1)
        assert hits() == {"cpu": 0, "fs": 0}
        for then in ({"cpu": 0, "fs": whole}, {"cpu": whole, "fs": whole}):
            vllm.reset()
            answer = vllm.generate([prompt])
            assert (answer.tokens, answer.cached) == (computed, [whole * BLOCK])
            until(lambda: sum(hits().values()) >= sum(then.values()), "the last figures are on the page")  # noqa: B023
            assert hits() == then

"""The dashboard and the alert rules in examples/monitoring: of metrics that exist, and understood by Prometheus."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from support_programs import needs
from support_prometheus import MONITORING, Prometheus, alerts, expressions, filled_in, panels, prometheus, rules

from kvtier.metrics import DEFINITIONS
from kvtier_remote.valkey.embedded import free_ports

NAME = re.compile(r"kvtier_[a-z_]+")
KNOWN = {definition.name for definition in DEFINITIONS}
SOMETIMES = {"kvtier_curve_missed_blocks_total", "kvtier_tier_events_total"}
SOMETIMES |= {definition.name for definition in DEFINITIONS if definition.of_engines}
"""Metrics without a value until something of the kind has happened, or but on the page of a service."""


def dashboard() -> Any:
    """The module that makes the dashboard."""
    spec = importlib.util.spec_from_file_location("monitoring_dashboard", MONITORING / "dashboard.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def metrics_of(expression: str) -> set[str]:
    return {re.sub("_bucket$", "", name) for name in NAME.findall(expression)}


def test_the_dashboard_is_the_one_that_is_made_of_the_table() -> None:
    assert (MONITORING / "dashboard.json").read_text() == dashboard().made()


def test_the_dashboard_shows_every_metric_and_no_other() -> None:
    assert set().union(*map(metrics_of, expressions())) == KNOWN


def test_panels_lie_side_by_side_and_say_what_they_are() -> None:
    assert len({panel["id"] for panel in panels()}) == len(panels())
    taken: set[tuple[int, int]] = set()
    for panel in panels():
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not cells & taken
        assert at["x"] + at["w"] <= 24
        taken |= cells


def test_a_description_ends_with_the_names_of_its_metrics() -> None:
    for panel in panels():
        if panel["type"] != "row":
            shown = [name for target in panel["targets"] for name in NAME.findall(target["expr"])]
            names = dict.fromkeys(re.sub("_bucket$", "", name) for name in shown)
            assert panel["description"].endswith(f". {', '.join(names)}")


def test_alerts_are_about_metrics_that_exist() -> None:
    assert set().union(*(metrics_of(rule["expr"]) for rule in alerts(rules()))) <= KNOWN


@pytest.mark.prometheus
def test_each_alert_fires_when_it_should_and_not_before(request: pytest.FixtureRequest) -> None:
    needs(request, "prometheus", "promtool")
    tested = yaml.safe_load((MONITORING / "alerts_test.yaml").read_text())["tests"]
    fired = {case["alertname"] for test in tested for case in test["alert_rule_test"] if case.get("exp_alerts")}
    assert fired == {rule["alert"] for rule in alerts(rules())}
    for what in (["check", "rules", "alerts.yaml"], ["test", "rules", "alerts_test.yaml"]):
        run = subprocess.run(["promtool", *what], cwd=MONITORING, capture_output=True, text=True, check=False)
        assert run.returncode == 0, run.stdout + run.stderr


@pytest.fixture
def watched(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Prometheus]:
    """A Prometheus that scrapes a replay every second and has the alert rules."""
    needs(request, "prometheus", "prometheus")
    (metrics,) = free_ports(1)
    command = [sys.executable, "-c", "from kvtier.cli import main; main()", "replay", "--requests", "1000000"]
    with (tmp_path / "replay.log").open("w") as log:
        replay = subprocess.Popen([*command, "--metrics-port", str(metrics)], stdout=log, stderr=log)
    try:
        with prometheus(tmp_path, {"kvtier": metrics}, rules(), scrape_seconds=1) as one:
            while scrapes(one) < 10:  # the test's own time limit ends waiting for more
                assert replay.poll() is None, "the replay ended by itself"
                time.sleep(0.2)
            yield one
    finally:
        replay.terminate()
        replay.wait(60)


def scrapes(one: Prometheus) -> int:
    """How often the replay was scraped."""
    counted = one.vector("min(count_over_time(kvtier_hit_blocks_total[5m]))")
    return int(counted[0][1]) if counted else 0


@pytest.mark.prometheus
def test_prometheus_answers_every_expression(watched: Prometheus) -> None:
    for expression in expressions():
        found = watched.vector(filled_in(expression, rate_interval_seconds=5))
        divided = " > 0)" in expression or "state!=" in expression
        assert found or divided or metrics_of(expression) & SOMETIMES, expression
    (group,) = watched.ask("rules")["groups"]
    assert {rule["name"] for rule in group["rules"]} == {rule["alert"] for rule in alerts(rules())}
    assert {rule["health"] for rule in group["rules"]} == {"ok"}
    assert [rule["name"] for rule in group["rules"] if rule["state"] == "firing"] == []

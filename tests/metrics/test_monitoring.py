"""The dashboard and the alert rules in examples/monitoring: of metrics that exist, and understood by Prometheus."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvtier.metrics import DEFINITIONS

MONITORING = Path(__file__).parents[2] / "examples" / "monitoring"
NAME = re.compile(r"kvtier_[a-z_]+")
KNOWN = {definition.name for definition in DEFINITIONS}
SOMETIMES = {
    "kvtier_block_errors_total",
    "kvtier_breaker_transitions_total",
    "kvtier_curve_missed_blocks_total",
    "kvtier_curve_used_blocks_total",
    "kvtier_dropped_blocks_total",
    "kvtier_missed_deadlines_total",
    "kvtier_skipped_blocks_total",
    "kvtier_tier_events_total",
}
"""Metrics without a value until something of the kind has happened."""


def dashboard() -> Any:
    """The module that makes the dashboard."""
    spec = importlib.util.spec_from_file_location("monitoring_dashboard", MONITORING / "dashboard.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def expressions() -> list[str]:
    """Every expression of the dashboard, as it is in the file."""
    panels = json.loads((MONITORING / "dashboard.json").read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel.get("targets", ())]


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((MONITORING / "alerts.yaml").read_text())["groups"]
    found: list[dict[str, Any]] = group["rules"]
    return found


def metrics_of(expression: str) -> set[str]:
    return {re.sub("_bucket$", "", name) for name in NAME.findall(expression)}


def test_the_dashboard_is_the_one_that_is_made_of_the_table() -> None:
    assert (MONITORING / "dashboard.json").read_text() == dashboard().made()


def test_the_dashboard_shows_every_metric_and_no_other() -> None:
    assert set().union(*map(metrics_of, expressions())) == KNOWN


def test_panels_lie_side_by_side_and_say_what_they_are() -> None:
    panels = json.loads((MONITORING / "dashboard.json").read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not cells & taken
        assert at["x"] + at["w"] <= 24
        taken |= cells
        assert panel["type"] == "row" or panel["description"]


def test_alerts_are_about_metrics_that_exist() -> None:
    assert set().union(*(metrics_of(rule["expr"]) for rule in rules())) <= KNOWN


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool, of the package prometheus")
def test_each_alert_fires_when_it_should_and_not_before() -> None:
    tested = yaml.safe_load((MONITORING / "alerts_test.yaml").read_text())["tests"]
    fired = {case["alertname"] for test in tested for case in test["alert_rule_test"] if case.get("exp_alerts")}
    assert fired == {rule["alert"] for rule in rules()}
    for what in (["check", "rules", "alerts.yaml"], ["test", "rules", "alerts_test.yaml"]):
        run = subprocess.run(["promtool", *what], cwd=MONITORING, capture_output=True, text=True, check=False)
        assert run.returncode == 0, run.stdout + run.stderr


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def asked(port: int, path: str, **query: str) -> Any:
    """What Prometheus answers."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/{path}?{urllib.parse.urlencode(query)}") as answer:
        document = json.load(answer)
    assert document["status"] == "success", document
    return document["data"]


@pytest.fixture
def watched(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[int]:
    """The port of a Prometheus that scrapes a replay every second and has the alert rules."""
    if shutil.which("prometheus") is None:
        if "prometheus" in (request.config.getoption("-m") or ""):
            pytest.fail("prometheus is not installed")
        pytest.skip("needs prometheus")
    metrics, port = free_port(), free_port()
    scraped = {"job_name": "kvtier", "static_configs": [{"targets": [f"127.0.0.1:{metrics}"]}]}
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(MONITORING / "alerts.yaml")],
        "scrape_configs": [scraped],
    }
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
    replay = [sys.executable, "-c", "from kvtier.cli import main; main()", "replay", "--requests", "1000000"]
    server = ["prometheus", f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data"]
    with (tmp_path / "log").open("w") as log:
        processes = [
            subprocess.Popen([*replay, "--metrics-port", str(metrics)], stdout=log, stderr=log),
            subprocess.Popen([*server, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log),
        ]
    try:
        while not all(scrapes(port, process) >= 10 for process in processes):
            time.sleep(0.2)
        yield port
    finally:
        for process in processes:
            process.terminate()
            process.wait(60)


def scrapes(port: int, process: subprocess.Popen[bytes]) -> int:
    """How often the replay was scraped; the test's own time limit ends waiting for more."""
    assert process.poll() is None, "it ended by itself"
    try:
        counted = asked(port, "query", query="min(count_over_time(kvtier_hit_blocks_total[5m]))")["result"]
    except OSError:
        return 0
    return int(counted[0]["value"][1]) if counted else 0


@pytest.mark.prometheus
def test_prometheus_answers_every_expression(watched: int) -> None:
    for expression in expressions():
        for name, value in (("$__rate_interval", "5s"), ("$job", ".*"), ("$instance", ".*"), ("$tier", ".*")):
            expression = expression.replace(name, value)
        found = asked(watched, "query", query=expression)["result"]
        divided = " > 0)" in expression or "state!=" in expression
        assert found or divided or metrics_of(expression) & SOMETIMES, expression
    (group,) = asked(watched, "rules")["groups"]
    assert {rule["name"] for rule in group["rules"]} == {rule["alert"] for rule in rules()}
    assert {rule["health"] for rule in group["rules"]} == {"ok"}
    assert [rule["name"] for rule in group["rules"] if rule["state"] == "firing"] == []

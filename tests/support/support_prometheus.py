"""A real Prometheus for tests, and the dashboard and the rules of `examples/monitoring` as it reads them."""

from __future__ import annotations

import copy
import json
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from support_paths import PROJECT

from kvtier_remote.valkey.embedded import free_ports

MONITORING = PROJECT / "examples" / "monitoring"
START_SECONDS = 60.0


def panels() -> list[dict[str, Any]]:
    """The panels of the dashboard, as they are in the file."""
    found: list[dict[str, Any]] = json.loads((MONITORING / "dashboard.json").read_text())["panels"]
    return found


def expressions(title: str | None = None) -> list[str]:
    """Every expression of the dashboard, or those of one panel."""
    shown = [panel for panel in panels() if title in (None, panel["title"])]
    return [target["expr"] for panel in shown for target in panel.get("targets", ())]


def filled_in(expression: str, rate_interval_seconds: int, job: str = ".*") -> str:
    """An expression of the dashboard as Grafana sends it: of one job, or of all."""
    values = {"$__rate_interval": f"{rate_interval_seconds}s", "$job": job, "$instance": ".*", "$tier": ".*"}
    for name, value in values.items():
        expression = expression.replace(name, value)
    return expression


def rules() -> dict[str, Any]:
    """The document with the alert rules."""
    document: dict[str, Any] = yaml.safe_load((MONITORING / "alerts.yaml").read_text())
    return document


def alerts(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rules of a document of one group."""
    (group,) = document["groups"]
    found: list[dict[str, Any]] = group["rules"]
    return found


def hastened(document: Mapping[str, Any], for_seconds: int) -> dict[str, Any]:
    """The same rules for a drill of minutes: each fires once it was pending for so many seconds."""
    short = copy.deepcopy(dict(document))
    for rule in alerts(short):
        rule["for"] = f"{for_seconds}s"
    return short


class Prometheus:
    """A server that runs, asked through its HTTP interface. Times are Unix seconds, by the scrapes' own timestamps."""

    def __init__(self, port: int) -> None:
        self.port = port

    def ask(self, path: str, **query: str) -> Any:
        """What it answers. Raises OSError."""
        url = f"http://127.0.0.1:{self.port}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url) as answer:
            document = json.load(answer)
        assert document["status"] == "success", document
        return document["data"]

    def now(self) -> float:
        """The time by its clock."""
        return float(self.ask("query", query="time()")["result"][1])

    def vector(self, expression: str, at: float | None = None) -> list[tuple[dict[str, str], float]]:
        """The labels and the value of each series, now or at another time."""
        when = {} if at is None else {"time": f"{at:.3f}"}
        found = self.ask("query", query=expression, **when)["result"]
        return [(one["metric"], float(one["value"][1])) for one in found]

    def samples(self, selector: str) -> list[tuple[dict[str, str], list[float]]]:
        """The labels of each series, and when it had a sample in the last hour."""
        found = self.ask("query", query=f"{selector}[1h]")["result"]
        return [(one["metric"], [float(at) for at, _ in one["values"]]) for one in found]

    def scrapes(self, job: str) -> list[float]:
        """When a job was scraped."""
        return sorted(at for _, times in self.samples(f'up{{job="{job}"}}') for at in times)

    def alerts(self, job: str, state: str) -> dict[str, list[float]]:
        """When each alert of a job was in a state, `pending` or `firing`, by its name."""
        found: dict[str, list[float]] = {}
        for labels, times in self.samples(f'ALERTS{{job="{job}", alertstate="{state}"}}'):
            found[labels["alertname"]] = sorted([*found.get(labels["alertname"], ()), *times])
        return found


@contextmanager
def prometheus(
    folder: Path, targets: Mapping[str, int], rules: Mapping[str, Any], scrape_seconds: int, evaluation_seconds: int = 1
) -> Iterator[Prometheus]:
    """A Prometheus with these rules that scrapes a job at each of some ports of this machine."""
    jobs = [{"job_name": job, "static_configs": [{"targets": [f"127.0.0.1:{port}"]}]} for job, port in targets.items()]
    (folder / "rules.yml").write_text(yaml.safe_dump(dict(rules)))
    config = {
        "global": {"scrape_interval": f"{scrape_seconds}s", "evaluation_interval": f"{evaluation_seconds}s"},
        "rule_files": ["rules.yml"],
        "scrape_configs": jobs,
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    (port,) = free_ports(1)
    command = ["prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log)
    try:
        one = Prometheus(port)
        deadline = time.monotonic() + START_SECONDS
        while not _ready(one):
            assert process.poll() is None, f"Prometheus ended: {(folder / 'log').read_text()[-2000:]}"
            assert time.monotonic() < deadline, "Prometheus does not answer"
            time.sleep(0.1)
        yield one
    finally:
        process.terminate()
        process.wait(60)


def _ready(one: Prometheus) -> bool:
    try:
        one.ask("query", query="1")
    except OSError:
        return False
    return True

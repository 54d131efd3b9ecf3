"""A drill: four faults in running stacks, and what the shipped dashboard and alert rules say of each in a Prometheus.

It scrapes every 5 s. The rules are the shipped ones, but for the time from pending to firing: 10 s, where the shipped
ones take minutes. What an alert looks at is as long as shipped. So one on the last minutes goes on after its fault, and
the end of a fault is looked for where an alert shows what is now.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass

import pytest
from support_drill import stacks
from support_programs import needs
from support_prometheus import Prometheus, alerts, expressions, filled_in, hastened, prometheus, rules

pytestmark = [pytest.mark.prometheus, pytest.mark.long]

SCRAPE_SECONDS = 5
SHOWN_WITHIN_SECONDS = 15
RATE_INTERVAL_SECONDS = 4 * SCRAPE_SECONDS
"""What Grafana puts for `$__rate_interval` at such a scrape interval."""
FOR_SECONDS = 10
QUIET_SCRAPES = 5
LIMIT_SECONDS = 120.0


@dataclass(frozen=True)
class Shown:
    """Where a fault must be seen: a panel, the series in it, the value that it exceeds then and never before, and the
    alert. `also` may fire as well: what else is true of that stack."""

    panel: str
    series: Mapping[str, str]
    above: float
    alert: str
    also: frozenset[str] = frozenset()


FULL = frozenset({"KvtierNearCapacity"})
"""The CPU tier of a stack whose disk or server is to be used must evict."""
FAULTS = {
    "frozen_disk": Shown(
        "Oldest transfer job in flight",
        {"tier": "fs"},
        2.0,
        "KvtierTierHangs",
        FULL | {"KvtierTierDown", "KvtierTierFails", "KvtierDrops"},
    ),
    "small_cpu_tier": Shown("Evicted and expired", {"tier": "cpu"}, 0.0, "KvtierNearCapacity"),
    "evicting_server": Shown(
        "Evicted and expired", {"tier": "valkey", "reason": "server.evicted"}, 0.0, "KvtierServerEvicts", FULL
    ),
    "corrupting_disk": Shown("Errors", {"tier": "fs", "reason": "corrupt"}, 0.0, "KvtierCorruptBlocks", FULL),
}
each = pytest.mark.parametrize("fault", FAULTS)


@dataclass(frozen=True)
class Drill:
    """A drill that is over: the Prometheus that watched it, and when the faults began and ended."""

    watcher: Prometheus
    begun: float
    ended: float

    def scrapes_within(self, fault: str) -> list[float]:
        """When the stack was scraped in the time in which a fault must show."""
        return [at for at in self.watcher.scrapes(fault) if self.begun < at <= self.begun + SHOWN_WITHIN_SECONDS]

    def most(self, fault: str, at: float) -> float:
        """The largest value of a fault's series in its panel, 0 if there is none, as a dashboard showed it then."""
        shown, found = FAULTS[fault], [0.0]
        for expression in expressions(shown.panel):
            for labels, value in self.watcher.vector(filled_in(expression, RATE_INTERVAL_SECONDS, fault), at):
                if shown.series.items() <= labels.items():
                    found.append(value)
        return max(found)


EXPECTED = {(fault, shown.alert) for fault, shown in FAULTS.items()}
SHOWS_NOW = {("frozen_disk", "KvtierTierHangs")}


def until(watcher: Prometheus, condition: Callable[[], bool], what: str) -> float:
    """Ask the Prometheus until something holds; the time then, by the clock of scrapes."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"{what}: {watcher.vector('ALERTS')}"
        time.sleep(0.5)
    return watcher.now()


def firing(watcher: Prometheus) -> set[tuple[str, str]]:
    """The faults and the alerts that fire now."""
    found = watcher.vector('ALERTS{alertstate="firing"}')
    return {(labels["job"], labels["alertname"]) for labels, _ in found}


@pytest.fixture(scope="module")
def drill(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Drill]:
    """All faults at once, until every alert has fired; then none. Prometheus answers until the end of these tests."""
    needs(request, "prometheus", "prometheus")
    folder = tmp_path_factory.mktemp("drill")
    short = hastened(rules(), FOR_SECONDS)
    with ExitStack() as exits:
        driven = exits.enter_context(stacks(folder))
        watcher = exits.enter_context(prometheus(folder, driven.ports, short, SCRAPE_SECONDS))
        begun = until(watcher, lambda: all(len(watcher.scrapes(name)) >= QUIET_SCRAPES for name in FAULTS), "scrapes")
        driven.say("begin")
        ended = until(watcher, lambda: firing(watcher) >= EXPECTED, "not every alert fires")
        driven.say("end")
        until(watcher, lambda: not firing(watcher) & SHOWS_NOW, "the alert of a hanging disk is not resolved")
        yield Drill(watcher, begun, ended)


@each
def test_a_panel_shows_the_fault_within_15_s_and_not_before(drill: Drill, fault: str) -> None:
    limit = FAULTS[fault].above
    before = [at for at in drill.watcher.scrapes(fault) if at <= drill.begun]
    assert [drill.most(fault, at) for at in before if drill.most(fault, at) > limit] == []
    values = {at - drill.begun: drill.most(fault, at) for at in drill.scrapes_within(fault)}
    print(fault, values)
    assert max(values.values()) > limit, values


@each
def test_its_alert_is_pending_within_15_s_and_fires_after_its_time(drill: Drill, fault: str) -> None:
    alert = FAULTS[fault].alert
    pending = drill.watcher.alerts(fault, "pending")[alert]
    fires = drill.watcher.alerts(fault, "firing")[alert]
    print(fault, "pending after", pending[0] - drill.begun, "s, fires after", fires[0] - drill.begun)
    assert drill.begun < pending[0] <= drill.begun + SHOWN_WITHIN_SECONDS
    assert pending[0] + FOR_SECONDS <= fires[0]


@each
def test_no_other_alert_fires(drill: Drill, fault: str) -> None:
    shown = FAULTS[fault]
    assert set(drill.watcher.alerts(fault, "firing")) - shown.also == {shown.alert}


def test_the_rules_of_the_drill_are_the_shipped_ones_but_for_their_time() -> None:
    short, shipped = alerts(hastened(rules(), FOR_SECONDS)), alerts(rules())
    assert [rule | {"for": ""} for rule in short] == [rule | {"for": ""} for rule in shipped]
    assert all(rule["for"].endswith("m") for rule in shipped if rule["alert"] in {one for _, one in EXPECTED})

"""The lines for operators: each says what it must, none is told too often, and none has anything of a user in it."""

from __future__ import annotations

import dataclasses
import errno
import logging
import shlex

import pytest
from support_control import World, cpu_setup, fs_setup
from support_joining import Driver
from support_stack import PLAIN, Engine, fs, keys, parts_of, shared_fs, stack_file
from support_stack_tiers import MemoryTier, backends

from kvtier.control.tiers.breaker import Breaker
from kvtier.errors import ResourceError
from kvtier.stack.watching.operator_log import LINES_MAX, LOGGER, WINDOW_SECONDS, OperatorLog, TierWatch, line
from kvtier.types.jobs import failed

EVENTS = {
    "tier_open": {"tier", "type", "mode", "capacity_bytes", "recovered_blocks", "seconds"},
    "tier_held_back": {"tier", "reason"},
    "tier_down": {"tier", "breakers", "failed_blocks", "corrupt_blocks", "late_blocks"},
    "tier_up": {"tier", "down_seconds"},
    "reset": {"epoch", "durable", "seconds"},
    "closed": {"dropped_blocks", "unfinished_jobs", "seconds"},
}
"""Every event, and the names of its values."""


@pytest.fixture(autouse=True)
def _everything(caplog) -> None:
    caplog.set_level(logging.DEBUG)


def told(caplog) -> list[dict[str, str]]:
    """The values of each line, its level among them. A line must be whole and have no name that is not documented."""
    found = []
    for record in caplog.records:
        if record.name == LOGGER:
            message = record.getMessage()
            assert "\n" not in message
            values = dict(part.split("=", 1) for part in shlex.split(message))
            assert set(values) - {"event", "left_out"} <= EVENTS[values["event"]]
            found.append(values | {"level": record.levelname})
    return found


def events(caplog) -> list[str]:
    return [one["event"] for one in told(caplog)]


def one(caplog, event: str, **wanted: str) -> dict[str, str]:
    """The only line of an event with these values."""
    (found,) = [each for each in told(caplog) if each["event"] == event and wanted.items() <= each.items()]
    return found


def test_a_tier_that_opens_says_how_and_what_it_found(tmp_path, caplog):
    lowers = fs(tmp_path / "slab"), shared_fs(tmp_path / "a folder")
    config = stack_file(PLAIN, 16, *lowers)
    engine = Engine(PLAIN, 8)
    with Driver(parts_of(config, engine), engine) as stack:
        assert stack.store(keys(8)) == ["stored"] * 8
        stack.drain()
    caplog.clear()
    engine = Engine(PLAIN, 8)
    with Driver(parts_of(config, engine), engine) as stack:
        found = {each["tier"]: each for each in told(caplog)}
        assert events(caplog) == ["tier_open"] * 3
        for name, figures in stack.stack.stats().tiers.items():
            assert int(found[name]["capacity_bytes"]) == figures.capacity_bytes
            assert found[name]["mode"] == figures.mode
        assert (found["fs"]["recovered_blocks"], found["fs"]["type"]) == ("8", "fs")
        assert "recovered_blocks" not in found["shared_fs"], "nobody counts what other hosts store"
        assert float(found["fs"]["seconds"]) >= 0
    assert one(caplog, "closed")["level"] == "INFO"


def memory_stack(engine: Engine, **options: object) -> tuple[Driver, MemoryTier]:
    parts = parts_of(stack_file(PLAIN, 32, {"type": "memory", **options}, backends=backends()), engine, backends())
    tier = parts.tiers[-1]
    assert isinstance(tier, MemoryTier)
    return Driver(parts, engine), tier


def test_a_tier_that_goes_down_and_comes_back_is_two_lines(caplog, monkeypatch):
    engine = Engine(PLAIN, 64)
    driver, tier = memory_stack(engine)
    with driver as stack:
        (lower,) = stack.stack._assembled.plane.control.lowers
        tier.spoil = lambda kind, key: failed(errno.EIO)
        for number in range(lower.store_breaker.threshold + 1):
            assert stack.store(keys(1, start=number)) == ["stored"]
            stack.drain()
        down = one(caplog, "tier_down")
        assert down["breakers"] == "load closed, store open"
        assert (down["level"], int(down["failed_blocks"])) == ("WARNING", lower.store_breaker.threshold)
        assert "tier_up" not in events(caplog)
        tier.spoil = lambda kind, key: None
        lower.store_breaker._retry_at = 0.0
        assert stack.store(keys(1, start=100)) == ["stored"]
        stack.drain()
        up = one(caplog, "tier_up")
        assert (up["tier"], up["level"]) == ("memory", "INFO")
        assert float(up["down_seconds"]) > 0


def test_a_reset_says_whether_it_is_durable(caplog):
    driver, tier = memory_stack(Engine(PLAIN, 8))
    with driver as stack:
        stack.reset()
        done = one(caplog, "reset")
        assert (done["epoch"], done["durable"], done["level"]) == ("1", "yes", "INFO")
        caplog.clear()

        async def refuse(epoch: int) -> None:
            raise ResourceError("no disk")

        tier.reset = refuse
        with pytest.raises(ResourceError, match="no disk"):
            stack.reset()
        assert (one(caplog, "reset")["durable"], one(caplog, "reset")["level"]) == ("no", "ERROR")
        del tier.reset


def test_what_closing_lost_is_a_warning(caplog):
    engine = Engine(PLAIN, 64)
    parts = parts_of(
        stack_file(PLAIN, 32, {"type": "memory"}, backends=backends()), engine, backends(), close_timeout_seconds=0.0
    )
    with Driver(parts, engine) as stack:
        parts.tiers[-1].spoil = lambda kind, key: failed(errno.EIO)
        assert stack.store(keys(12)) == ["stored"] * 12
    closed = one(caplog, "closed")
    report = stack.stack.close_report
    assert int(closed["dropped_blocks"]) == report.dropped_blocks > 0
    assert closed["level"] == "WARNING"


def test_no_line_has_a_key_a_request_or_a_namespace_in_it(tmp_path, caplog):
    engine = Engine(PLAIN, 64)
    parts = parts_of(stack_file(PLAIN, 16, fs(tmp_path / "slab")), engine)
    parts = dataclasses.replace(parts, namespace=dataclasses.replace(parts.namespace, tag="a tenant"))
    names = keys(8)
    with Driver(parts, engine) as stack:
        assert stack.store(names) == ["stored"] * 8
        stack.drain()
        stack.reset()
        stack.stack.engine.hold_back("a reason")
    assert {"tier_open", "reset", "tier_held_back", "closed"} <= set(events(caplog))
    assert "a tenant" not in caplog.text
    for name in names:
        assert bytes(name).hex() not in caplog.text
        assert repr(bytes(name)) not in caplog.text


def test_a_handler_that_raises_costs_no_request_anything(caplog):
    class Broken(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "tier_down" in record.getMessage():
                raise RuntimeError("the log is full")

    engine, broken = Engine(PLAIN, 64), Broken()
    driver, tier = memory_stack(engine)
    logging.getLogger(LOGGER).addHandler(broken)
    try:
        with driver as stack:
            tier.spoil = lambda kind, key: failed(errno.EIO)
            for number in range(Breaker().threshold + 1):
                assert stack.store(keys(1, start=number)) == ["stored"]
                stack.drain()
            assert stack.load(keys(1)) == ["loaded"]
            assert stack.stack.stats().errors >= 1
    finally:
        logging.getLogger(LOGGER).removeHandler(broken)


# -- how often ---------------------------------------------------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_more_lines_of_a_subject_than_its_share_are_counted_and_left_out(caplog):
    clock = Clock()
    log = OperatorLog(logging.getLogger(LOGGER), clock)
    written = [log.tell("reset", "disk", epoch=number) for number in range(LINES_MAX + 3)]
    assert written == [True] * LINES_MAX + [False] * 3
    assert log.tell("reset", "another", epoch=0), "each subject has a share of its own"
    clock.now = WINDOW_SECONDS
    assert log.tell("reset", "disk", epoch=99)
    assert told(caplog)[-1]["left_out"] == "3"
    assert log.tell("reset", "disk", epoch=100)
    assert "left_out" not in told(caplog)[-1]


def test_a_tier_that_flaps_is_told_within_bounds_and_in_the_end_as_it_is(caplog):
    clock, world = Clock(), World(cpu_setup(4), [fs_setup(8)])
    lowers = world.plane.control.lowers
    watch = TierWatch(OperatorLog(logging.getLogger(LOGGER), clock), clock)
    watch.look(lowers)
    assert events(caplog) == ["tier_open"]
    breaker = lowers[0].load_breaker
    for _ in range(20):
        for _ in range(breaker.threshold):
            breaker.on_failure(clock.now)
        for _ in range(100):
            watch.look(lowers)
        breaker.on_success()
        for _ in range(100):
            watch.look(lowers)
    assert events(caplog) == ["tier_open", *["tier_down", "tier_up"] * 2, "tier_down"]
    clock.now = WINDOW_SECONDS
    watch.look(lowers)
    last = told(caplog)[-1]
    assert (last["event"], last["left_out"]) == ("tier_up", "18")
    watch.look(lowers)
    assert len(told(caplog)) == LINES_MAX + 1


def test_a_value_never_breaks_a_line():
    text = line("tier_held_back", {"tier": "fs", "reason": 'a "quoted"\nreason =', "mode": "", "seconds": 1.0})
    assert text == r'event=tier_held_back tier=fs reason="a \"quoted\"\nreason =" mode="" seconds=1.000'

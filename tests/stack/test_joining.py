"""Lower tiers whose namespace is not known in time: held back, then open; and tiers that are held back for good.

Nothing here waits for time to pass: the namespace becomes known when a test says so.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import shutil
from contextlib import suppress
from pathlib import Path

import pytest
from support_joining import Driver, Identity
from support_stack import PLAIN, Engine, fs, keys, parts_of, shared_fs, stack_file
from support_stack_tiers import backends

from kvtier.errors import ConfigError, ResourceError
from kvtier.tier.contract import LookupResult

UNKNOWN = 'reason="what its blocks belong to is not known yet"'
MISS, PENDING = LookupResult.MISS, LookupResult.HIT_PENDING
OLD, NEW, SPARE = keys(4), keys(4, start=100), keys(40, start=1000)


def driver(identity: Identity | None, *lowers: dict[str, object]) -> Driver:
    """A stack of 16 rows that is not open. Its namespace is complete without an identity."""
    engine = Engine(PLAIN, 8)
    config = stack_file(PLAIN, 16, *lowers, backends=backends())
    parts = parts_of(config, engine, backends(), tier_close_seconds=20.0)
    if identity is None:
        parts = dataclasses.replace(parts, namespace=dataclasses.replace(parts.namespace, weights="w"))
    return Driver(parts, engine, identity)


def both(folder: Path) -> list[dict[str, object]]:
    return [fs(folder / "slab"), shared_fs(folder / "files")]


@pytest.fixture
def filled(tmp_path) -> Path:
    """A folder with OLD in both tiers, left by an earlier process."""
    with driver(None, *both(tmp_path)) as stack:
        assert stack.joined()
        assert stack.store(OLD) == ["stored"] * 4
        stack.drain()
        assert {stack.tier(name).stored for name in ("fs", "shared_fs")} == {4}
    return tmp_path


def copy_if_there(source: str, target: str) -> None:
    """The tier removes what a reset ended in the background."""
    with suppress(FileNotFoundError):
        shutil.copyfile(source, target)


def lines(caplog, level: int) -> list[str]:
    return [record.message for record in caplog.records if record.levelno == level and "tier" in record.message]


def test_tiers_open_with_a_stack_whose_namespace_is_known(filled, caplog):
    with driver(None, *both(filled)) as stack:
        assert stack.joined()
        assert stack.tier("fs").joined == stack.tier("shared_fs").joined == 1
        assert stack.load(OLD) == ["loaded"] * 4
    assert not lines(caplog, logging.WARNING)


def test_held_back_tiers_neither_load_nor_store(filled, caplog):
    caplog.set_level(logging.INFO)
    with driver(Identity(), *both(filled)) as stack:
        assert not stack.joined()
        assert stack.lookup_once(OLD) == [MISS] * 4
        assert stack.locate(OLD) == [None] * 4
        assert stack.load(OLD) == ["missing"] * 4
        stack.refill(SPARE)
        plane = stack.stack._assembled.plane
        assert (plane.backlog, plane.dirty_rows) == (0, 0), "rows are clean, and nothing is held up"
        names = ("fs", "shared_fs")
        for name in names:
            figures = stack.tier(name)
            assert (figures.joined, figures.up, figures.stored) == (0, 0, 0)
            assert figures.dropped == {"held_back": len(SPARE)}
        stack.stack.check_integrity()
        assert lines(caplog, logging.WARNING) == [], "that is so at each start"
        told = [line for line in lines(caplog, logging.INFO) if "held_back" in line]
        assert told == [f"event=tier_held_back tier={name} {UNKNOWN}" for name in names]


def test_tiers_join_when_the_namespace_is_known(filled, caplog):
    caplog.set_level(logging.INFO)
    identity = Identity()
    with driver(identity, *both(filled)) as stack:
        assert stack.store(NEW) == ["stored"] * 4
        identity.answer()
        stack.until(stack.joined)
        assert stack.tier("fs").joined == stack.tier("shared_fs").joined == 1
        stored = [event.keys for event in stack.stack.take_events() if event.medium == "FS" and not event.removed]
        assert {key for names in stored for key in names} >= set(OLD)
        assert stack.lookup(OLD) == [PENDING] * 4
        assert stack.load(OLD) == ["loaded"] * 4
        stack.drain()
        assert stack.tier("fs").stored > 0, "what was in rows before is written back"
        stack.refill(SPARE)
        assert set(stack.locate(NEW)) == {"fs"}
        assert stack.load(NEW) == ["loaded"] * 4
        assert stack.tier("fs").dropped == {"held_back": 4}, "counts go on"
        stack.stack.check_integrity()
    opened = [line.split()[:2] for line in lines(caplog, logging.INFO) if "tier_open" in line]
    assert opened == [["event=tier_open", f"tier={name}"] for name in ("cpu", "fs", "shared_fs")]
    with driver(None, shared_fs(filled / "files")) as stack:
        assert stack.load([*OLD, *NEW]) == ["loaded"] * 8


def test_blocks_of_other_weights_are_not_found(filled):
    identity = Identity("other")
    with driver(identity, *both(filled)) as stack:
        identity.answer()
        stack.until(stack.joined)
        assert stack.load(OLD) == ["missing"] * 4


@pytest.mark.parametrize("error", [ConfigError("no digest", "workers"), OSError(5, "unreadable"), ValueError("bad")])
def test_a_namespace_that_fails_too_late_is_one_line_and_no_error(filled, caplog, error):
    identity = Identity()
    identity.error = error
    with driver(identity, *both(filled)) as stack:
        identity.answer()
        stack.until(lambda: bool(lines(caplog, logging.ERROR)))
        assert stack.load(OLD) == ["missing"] * 4
        assert stack.store(NEW) == ["stored"] * 4
        stack.reset()
        assert stack.tier("fs").joined == 0
    (line,) = lines(caplog, logging.ERROR)
    assert "fs, shared_fs" in line


def test_a_tier_that_cannot_be_opened_then_leaves_all_held_back(tmp_path, caplog):
    identity = Identity()
    stack = driver(identity, fs(tmp_path / "slab"), {"type": "memory", "name": "below"})

    async def refuse(context):
        raise ResourceError("no disk")

    stack.parts.tiers[3].open = refuse
    with stack:
        identity.answer()
        stack.until(lambda: bool(lines(caplog, logging.ERROR)))
        assert stack.store(NEW) == ["stored"] * 4
        assert stack.tier("fs").joined == stack.tier("below").joined == 0
    with driver(None, fs(tmp_path / "slab")):
        pass  # its root was left


# -- reset ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("resets", [1, 3])
def test_a_reset_while_held_back_holds_when_they_join_and_after_a_crash(filled, resets, tmp_path_factory):
    identity, crashed = Identity(), tmp_path_factory.mktemp("crashed") / "copy"
    with driver(identity, *both(filled)) as stack:
        for _ in range(resets):
            stack.reset()
        assert stack.store(NEW) == ["stored"] * 4
        identity.answer()
        stack.until(stack.joined)
        assert stack.lookup(OLD) == [MISS] * 4
        assert stack.load(OLD) == ["missing"] * 4
        shutil.copytree(filled, crashed, copy_function=copy_if_there)
        stack.refill(SPARE)
        assert stack.load(NEW) == ["loaded"] * 4
        stack.reset()
        assert stack.load(NEW) == ["missing"] * 4, "later resets go on from there"
    for folder in (filled, crashed):
        with driver(None, *both(folder)) as stack:
            assert stack.load(OLD) == ["missing"] * 4
            assert stack.store(OLD) == ["stored"] * 4
            stack.drain()
            assert {stack.tier(name).stored for name in ("fs", "shared_fs")} == {4}


def test_a_reset_between_the_opening_and_the_join_hands_the_tiers_over_once_more(filled):
    """The tiers are open and on their way to the control plane when the reset comes: what arrives then is stale."""
    identity = Identity()
    with driver(identity, *both(filled)) as stack:
        plane = stack.stack._assembled.plane
        taken, plane.join = [], lambda tiers, now: taken.append(tiers)
        identity.answer()
        stack.until(lambda: bool(taken))
        del plane.join
        stack.reset()
        plane.join(taken[0], stack.stack._clock())
        stack.until(stack.joined)
        assert plane.control.lowers[0] is not taken[0].lowers[0]
        assert plane.control.epoch == taken[0].epoch + 1
        assert stack.load(OLD) == ["missing"] * 4
    with driver(None, *both(filled)) as stack:
        assert stack.load(OLD) == ["missing"] * 4


def test_a_store_in_flight_during_the_join_is_kept_and_a_load_ends_well(filled):
    """The join changes the epoch from that of no tier to theirs; that is not a reset."""
    with driver(None, *both(filled)) as stack:
        stack.reset()
        assert stack.store(OLD) == ["stored"] * 4
    identity = Identity()
    with driver(identity, *both(filled)) as stack:
        assert stack.store(NEW) == ["stored"] * 4
        plane, clock = stack.stack._assembled.plane, stack.stack._clock
        taken, plane.join = [], lambda tiers, now: taken.append(tiers)
        identity.answer()
        stack.until(lambda: bool(taken))
        del plane.join
        submit = plane.submit
        plane.submit = lambda *job: (submit(*job), plane.join(taken[0], clock()))
        assert stack.load(NEW) == ["loaded"] * 4
        assert stack.joined()
        assert plane.control.epoch == taken[0].epoch


# -- closing -------------------------------------------------------------------------------------------------------


def test_closing_while_held_back_ends_the_wait(filled):
    identity = Identity()
    with driver(identity, *both(filled)) as stack:
        assert stack.store(NEW) == ["stored"] * 4
    assert identity.cancelled
    with driver(None, *both(filled)) as stack:
        assert stack.load(OLD) == ["loaded"] * 4


def test_closing_while_a_tier_opens_closes_what_has_opened(tmp_path):
    identity = Identity()
    stack = driver(identity, {"type": "memory", "name": "above"}, {"type": "memory", "name": "below"})
    above, below = stack.parts.tiers[2:]
    begun = []

    async def never(context):
        begun.append(context)
        await asyncio.Event().wait()

    below.open = never
    with stack:
        identity.answer()
        stack.until(lambda: bool(begun))
        assert begun[0].namespace.weights == "w"
    assert (above.closes, below.closes) == (1, 0)


# -- held back for good --------------------------------------------------------------------------------------------


def test_tiers_held_back_for_good_neither_load_nor_store(filled, caplog):
    with driver(None, *both(filled)) as stack:
        assert stack.load(OLD) == ["loaded"] * 4
        stack.reset()
        assert stack.store(NEW) == ["stored"] * 4
        stack.drain()
        stored = [stack.tier(name).stored for name in ("fs", "shared_fs")]
        stack.stack.engine.hold_back("the weights were replaced")
        stack.refill(SPARE)
        assert stack.lookup_once(NEW) == [MISS] * 4
        assert stack.locate(NEW) == [None] * 4
        assert stack.load(NEW) == ["missing"] * 4
        stack.reset()
        assert stack.store(NEW) == ["stored"] * 4
        assert [stack.tier(name).stored for name in ("fs", "shared_fs")] == stored
        assert stack.tier("fs").joined == stack.tier("shared_fs").joined == 0
        stack.stack.check_integrity()
    reason = 'reason="the weights were replaced"'
    assert lines(caplog, logging.WARNING) == [
        f"event=tier_held_back tier={name} {reason}" for name in ("fs", "shared_fs")
    ]
    with driver(None, *both(filled)) as stack:
        assert stack.load([*OLD, *NEW]) == ["missing"] * 8, "the resets were made durable, that after it too"


def test_tiers_held_back_for_good_do_not_join(filled):
    identity = Identity()
    with driver(identity, *both(filled)) as stack:
        stack.stack.engine.hold_back("the weights were replaced")
        stack.until(lambda: identity.cancelled)
        assert stack.store(NEW) == ["stored"] * 4
        assert stack.load(OLD) == ["missing"] * 4
        assert stack.tier("fs").joined == 0


# -- tiers of several epochs ---------------------------------------------------------------------------------------


def test_a_tier_that_missed_a_reset_is_reset_when_it_comes_back(tmp_path):
    slab, files = fs(tmp_path / "slab"), shared_fs(tmp_path / "files")
    other = fs(tmp_path / "other", name="other")
    with driver(None, slab, other, files) as stack:
        assert stack.store(OLD) == ["stored"] * 4
        stack.drain()
    with driver(None, slab) as stack:
        stack.reset()
    with driver(None, slab, other, files) as stack:
        assert stack.lookup(OLD) == [MISS] * 4
        assert stack.store(NEW) == ["stored"] * 4
        stack.drain()
        assert {name: stack.tier(name).stored for name in ("fs", "other", "shared_fs")} == {
            "fs": 4,
            "other": 4,
            "shared_fs": 4,
        }
    with driver(None, other) as stack:
        assert stack.load([*OLD, *NEW]) == ["missing"] * 4 + ["loaded"] * 4

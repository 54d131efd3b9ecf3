"""The fuzzer of records on disk: it reaches every struct, seals its lies, and is red without the protections."""

from __future__ import annotations

import asyncio
import re
from contextlib import suppress
from pathlib import Path
from random import Random
from struct import Struct

import pytest

from faults.attack import Budget, Tally
from faults.content import lies, records
from faults.content.lies import Liar, lying_roots
from faults.content.watched import contained
from kvtier.errors import RootError
from kvtier.stack.tier_stack import TierStack
from kvtier.stack.watching.operator_log import OperatorLog
from kvtier.tier import block_envelope
from kvtier.tier.checksum import seal, unseal
from kvtier_fs.format import region_header, snapshot, superblock, tree_records
from kvtier_fs.format.superblock import Superblock
from kvtier_fs.format.tree_records import Tree
from simulator.records import Field, Record, fields_of, forge_record, forged_number

LAYOUTS = ("slab", "files")
RECORDS = 240
SEEDS_MAX = 60
"""About one seed in twenty is red."""


def test_every_struct_of_the_format_is_attacked():
    known = dict(records.known_structs())
    parts = {f"kvtier.tier.block_envelope.{name}" for name in ("_SHARED", "_OWN", "_GENERATION", "_STATED")}
    missing = {name for name, form in known.items() if not any(form is one for one in records.STRUCTS)}
    assert missing == parts, "these are the halves of a slot's header, and fields of it"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_record_of_a_root_is_found(layout, tmp_path):
    found = {record.kind for record in Liar(Tally(), layout, tmp_path).template.records}
    if layout == "slab":
        assert found == {"superblock", "region header", "slot header", "snapshot", "lock", "manifest"}
    else:
        assert found == {"superblock", "epoch", "account", "lease", "block's header", "manifest"}


def test_fields_are_those_of_the_struct():
    assert fields_of(Struct("<I16sQ"), 24, "f") == [
        Field("f24", 24, 4, True),
        Field("f28", 28, 16, False),
        Field("f44", 44, 8, True),
    ]


def test_lies_are_sealed_and_most_differ(seed):
    rng = Random(seed)
    data = seal(b"KVTIERXX", bytes(range(40)), 128)
    record = Record("x", "file", 0, 128, b"KVTIERXX", tuple(fields_of(Struct("<I16sQ"), 24)), True)
    told = [forge_record(rng, record, data, [data]).data for _ in range(500)]
    assert all(unseal(b"KVTIERXX", one) is not None for one in told)
    assert len(set(told)) > 100


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_numbers_reach_the_limits_of_their_size(size, seed):
    rng = Random(seed)
    numbers = {forged_number(rng, size) for _ in range(5000)}
    bits = 8 * size
    assert {0, 1, 2**bits - 1, 2 ** (bits - 1), 2 ** (bits - 1) - 1, 2 ** (bits - 2)} <= numbers
    assert max(numbers) < 2**bits


async def reset_of_damaged_epochs(liar: Liar) -> None:
    """A stack on roots whose epochs cannot be written any more, since it was opened, is reset, and closed."""
    async with TierStack(liar._parts()) as stack:
        for file in {record.file for record in liar.template.records if record.kind == "epoch"}:
            (liar.folder / file).unlink()
            (liar.folder / file).mkdir()
        await liar._reset(stack)


@pytest.mark.parametrize(("logged", "problems"), [(True, 0), (False, 1)])
def test_a_reset_that_is_not_durable_is_one_line_in_the_log(logged, problems, tmp_path, monkeypatch):
    """It raises, and the line belongs to it; without that line the fuzzer is red."""
    liar = Liar(Tally(), "files", tmp_path)
    if not logged:
        monkeypatch.setattr(OperatorLog, "reset", lambda *_: None)
    with contained(liar.watch), pytest.raises(RootError, match="cannot be written"):
        asyncio.run(reset_of_damaged_epochs(liar))
    liar.check_released()
    assert len(liar.tally.problems) == problems
    assert all("is in the log 0 times" in problem for problem in liar.tally.problems)


def test_a_reset_that_is_not_durable_and_does_not_raise_is_red(tmp_path, monkeypatch):
    liar, reset = Liar(Tally(), "files", tmp_path), TierStack.reset

    async def silent(stack: TierStack) -> None:
        with suppress(RootError):
            await reset(stack)

    monkeypatch.setattr(TierStack, "reset", silent)
    with contained(liar.watch):
        asyncio.run(reset_of_damaged_epochs(liar))
    liar.check_released()
    (problem,) = liar.tally.problems
    assert re.search(r"errors that belong to no call: \[.event=reset epoch=\d+ durable=no", problem)


def without_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers may be as large as their field."""
    for module in (block_envelope, region_header, snapshot, superblock, tree_records):
        monkeypatch.setattr(module, "COUNTER_LIMIT", 1 << 80)


def without_possible(monkeypatch: pytest.MonkeyPatch) -> None:
    """A superblock is what it says."""
    monkeypatch.setattr(Superblock, "possible", True)
    monkeypatch.setattr(Tree, "possible", True)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("layout", "off", "first"), [("slab", without_limits, 16), ("files", without_possible, 21)])
def test_the_fuzzer_is_red_without(layout, off, first, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """One seed after the other from one that was red: it may not be, by what a root draws for itself, as its uuid."""
    monkeypatch.setattr(lies, "STEP_SECONDS", 2.0)
    with monkeypatch.context() as switched:
        off(switched)
        for tried in range(first, first + SEEDS_MAX):
            (tmp_path / str(tried)).mkdir()
            tally = lying_roots(Budget(RECORDS, tried, tmp_path / str(tried)), (layout,), until_wrong=True)
            if tally.problems:
                break
    print(f"red with seed {tried}: {tally}")
    assert tally.problems
    assert not tally.clean

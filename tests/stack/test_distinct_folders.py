"""A folder belongs to one tier: `kvtier check` and opening refuse a stack that names one twice, in the same words."""

from __future__ import annotations

import logging
import re
import threading
from pathlib import Path

import numpy as np
import pytest
from support_driver import ServedStack
from support_stack import PLAIN, Engine, fs, parts_of, shared_fs, stack_file
from support_tools import refusal, tool

from faults.stepped import SteppedStack
from kvtier.engines.engine_memory.memory import PagedMemory
from kvtier.engines.engine_memory.options import EngineMemoryOptions, options_model
from kvtier.engines.engine_memory.tier import EngineMemoryTier
from kvtier.errors import ConfigError, ResourceError
from kvtier.types.namespace import Namespace

DISK, OTHER = "disk", "link/disk"
PAGES = ("--layout", "full:page=4KiB,block=16")
FIRST, SECOND = "tiers[2].roots[0]", "tiers[3].roots[0]"
TWICE = {
    "one path, two tiers": (FIRST, SECOND, fs(Path(DISK), name="a"), fs(Path(DISK), name="b")),
    "a link, two tiers": (FIRST, SECOND, fs(Path(DISK), name="a"), fs(Path(OTHER), name="b")),
    "a link, one tier": (FIRST, "tiers[2].roots[1]", fs(Path(DISK), Path(OTHER))),
    "a link beside others": ("tiers[2].roots[1]", SECOND, fs(Path("x"), Path(DISK), name="a"), fs(Path(OTHER))),
    "fs beside shared_fs": (FIRST, "tiers[3].root", fs(Path(DISK)), shared_fs(Path(DISK))),
    "shared_fs beside fs, by a link": ("tiers[2].root", SECOND, shared_fs(Path(DISK)), fs(Path(OTHER))),
    "shared_fs twice": ("tiers[2].root", "tiers[3].root", shared_fs(Path(DISK), name="a"), shared_fs(Path(OTHER))),
}
"""By what is in it: the key that names a folder first, the one that names it again, the tiers."""


@pytest.fixture(params=[True, False], ids=["there", "not there yet"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A place with the folder `disk`, or where it would be made, and the link `link` that leads to the place."""
    (tmp_path / "link").symlink_to(tmp_path)
    if request.param:
        (tmp_path / DISK).mkdir(mode=0o700)
    return tmp_path


def placed(place: Path, tier: dict[str, object]) -> dict[str, object]:
    """The tier with its folders in the place."""
    if "root" in tier:
        return tier | {"root": str(place / str(tier["root"]))}
    return tier | {"roots": [str(place / root) for root in tier["roots"]]}  # type: ignore[attr-defined]


def written(place: Path, *tiers: dict[str, object]) -> Path:
    """A stack file with these tiers below the CPU tier."""
    file = place / "stack.yaml"
    options = [", ".join(f"{name}: {value}" for name, value in placed(place, tier).items()) for tier in tiers]
    lines = [f"  - {{{each}}}" for each in options]
    file.write_text("\n".join(["tiers:", "  - type: gpu", "  - {type: cpu, cpu_bytes_to_use: 1MiB}", *lines, ""]))
    return file


@pytest.mark.parametrize("case", TWICE)
def test_check_and_opening_name_both_keys(place: Path, case):
    first, second, *tiers = TWICE[case]
    line = refusal("check", written(place, *tiers), *PAGES)
    assert line.startswith(f"error: {second}: {place}/")
    assert f"is the folder of {first} too" in line
    before = sorted(place.rglob("*"))
    config = stack_file(PLAIN, 8, *(placed(place, tier) for tier in tiers))
    with pytest.raises(ConfigError) as raised:
        SteppedStack(parts_of(config, Engine(PLAIN, 8))).open()
    assert f"error: {raised.value}" == line
    with pytest.raises(ConfigError, match=re.escape(line.removeprefix("error: "))):
        ServedStack(parts_of(config, Engine(PLAIN, 8))).open()
    assert sorted(place.rglob("*")) == before


def test_without_a_look_at_the_machine_paths_are_compared(place: Path):
    twice = written(place, fs(Path(DISK), name="a"), shared_fs(Path(DISK)))
    assert "is the folder of tiers[2].roots[0] too" in refusal("check", twice, "--no-probe", *PAGES)
    by_link = written(place, fs(Path(DISK), name="a"), shared_fs(Path(OTHER)))
    assert tool("check", by_link, "--no-probe", *PAGES).exit_code == 0


@pytest.mark.parametrize("face", [SteppedStack, ServedStack])
def test_a_folder_inside_another_and_one_beside_it_are_distinct(face: type[SteppedStack | ServedStack], place: Path):
    (place / DISK).mkdir(mode=0o700, exist_ok=True)
    tiers = fs(Path(DISK), name="a"), shared_fs(Path(DISK) / "inner"), fs(Path("disk-0"), name="b")
    assert tool("check", written(place, *tiers), *PAGES).exit_code == 0
    for _ in range(2):
        config = stack_file(PLAIN, 8, *(placed(place, tier) for tier in tiers))
        with face(parts_of(config, Engine(PLAIN, 8))) as stack:
            assert [tier.breaker for tier in stack.stats().tiers.values()] == ["closed"] * 4


def test_below_the_memory_of_an_engine_as_well(place: Path):
    roots = [str(place / DISK), str(place / OTHER)]
    options = options_model(EngineMemoryOptions, "fs", "Options")(type="fs", roots=roots, capacity="8MiB")
    memory = PagedMemory([[np.zeros((8, 4096), np.uint8)]])
    with pytest.raises(ConfigError, match=r"^roots\[1\]: .* is the folder of roots\[0\] too"):
        EngineMemoryTier(options, Namespace(PLAIN), memory, "tier", logging.getLogger("test"))


def test_a_file_system_that_does_not_answer_ends_the_opening(place: Path, monkeypatch: pytest.MonkeyPatch):
    answer = threading.Event()
    monkeypatch.setattr("kvtier.stack.distinct_folders._place", lambda folder: answer.wait())
    config = stack_file(PLAIN, 8, placed(place, fs(Path(DISK), Path(OTHER))))
    try:
        with pytest.raises(ResourceError, match=r"could not be compared within 0\.5 s"):
            SteppedStack(parts_of(config, Engine(PLAIN, 8), open_timeout_seconds=0.5)).open()
    finally:
        answer.set()

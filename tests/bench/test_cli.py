"""`kvtier bench`: it measures every tier with its bytes checked, and leaves a user's disks as they were."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from support_stack import PLAIN, Engine, fs, keys, parts_of, stack_file, statuses, whole

from faults.stepped import SteppedStack
from kvtier.cli import main
from kvtier.cli.terminal import BAR_CELLS, bar
from kvtier.errors import ConfigError
from kvtier.tools.bench.results import machine
from kvtier.tools.bench.run import PREFIX, folder_beside
from kvtier.types.jobs import MISSING, JobKind, JobResult, TransferJob
from kvtier.types.keys import OffloadKey
from kvtier_fs import FSBackend

QUICK = ("--seconds", "0.02", "--bytes", "2MiB", "--device", "cpu", "--sizes", "16KiB")
HYBRID = "full:page=32KiB,block=16;sliding_window:page=16KiB,block=16,window=512"


def bench(stack: Path, *arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["bench", str(stack), *QUICK, *map(str, arguments)])


def figures(stack: Path, *arguments: str) -> dict[str, Any]:
    path = stack.with_suffix(".json")
    result = bench(stack, *arguments, "--json", path)
    assert result.exit_code == 0, result.output
    told: dict[str, Any] = json.loads(path.read_text())
    return told


def write(tmp_path: Path, *lowers: str) -> Path:
    stack = tmp_path / "stack.yaml"
    stack.write_text("\n".join(["tiers:", "  - type: gpu", "  - {type: cpu, cpu_bytes_to_use: 1TiB}", *lowers]) + "\n")
    return stack


def disk(*roots: Path, extra: str = "") -> str:
    return f"  - {{type: fs, roots: [{', '.join(map(str, roots))}], capacity: 1PiB, min_free_bytes: 0{extra}}}"


def test_every_tier_is_measured_and_every_byte_right(tmp_path: Path) -> None:
    told = figures(write(tmp_path, disk(tmp_path / "one", tmp_path / "two")), "--layout", HYBRID, "--factor", "2")
    assert told["ok"]
    assert [tier["place"] for tier in told["tiers"]] == [
        *("", ""),
        *(str(tmp_path / "one"), str(tmp_path / "two"), "2 roots together"),
    ]
    for tier in told["tiers"]:
        assert tier["checked_blocks"] > 0
        assert tier["wrong_blocks"] == 0
        assert all(figure["gib_per_second"] > 0 for figure in tier["figures"])
    gpu, cpu, *disks = told["tiers"]
    assert {"to_rows", "to_GPU_scattered"} <= {figure["move"] for figure in gpu["figures"]}
    assert {"store", "load", "populate", "memcpy"} <= {figure["move"] for figure in cpu["figures"]}
    for tier in disks:
        moves = [(figure["move"], figure["block_bytes"]) for figure in tier["figures"]]
        assert moves == [("store", 16384), ("load", 16384), ("store", 65536), ("load", 65536)]
        assert all(0 < figure["single_p50_us"] <= figure["single_p99_us"] for figure in tier["figures"])
        own = [figure for figure in tier["figures"] if figure["tokens_per_second"] is not None]
        assert [figure["block_bytes"] for figure in own] == [65536, 65536]


def test_a_shared_root_is_measured_too(tmp_path: Path) -> None:
    shared = f"  - {{type: shared_fs, root: {tmp_path}/shared, capacity: 1PiB, min_free_bytes: 0}}"
    told = figures(write(tmp_path, shared), "--layout", "full:page=16KiB")
    assert [figure["move"] for figure in told["tiers"][2]["figures"]] == ["store", "load"]
    assert told["tiers"][2]["checked_blocks"] > 0


def test_what_is_stored_in_a_root_in_use_stays_as_it_is(tmp_path: Path) -> None:
    root = tmp_path / "root"
    engine, names = Engine(PLAIN, 16), keys(8)
    with SteppedStack(parts_of(stack_file(PLAIN, 8, fs(root)), engine)) as stack:
        assert run(stack, engine, JobKind.STORE, names) == {"stored"}
        while stack.has_pending_work:
            stack.step()
            stack.wait(0.05)
        before = {entry.name: (entry.stat().st_ino, entry.stat().st_mtime_ns) for entry in os.scandir(root)}
        assert figures(write(tmp_path, disk(root)), "--layout", "full:page=16KiB")["ok"]
        after = {entry.name: (entry.stat().st_ino, entry.stat().st_mtime_ns) for entry in os.scandir(root)}
        assert after == before
        assert run(stack, engine, JobKind.LOAD, names) == {"loaded"}
    assert not list(tmp_path.glob(f"{PREFIX}*"))


def run(stack: SteppedStack, engine: Engine, kind: JobKind, names: list[OffloadKey]) -> set[str]:
    """Store blocks as their keys say, or load and compare them; the outcomes."""
    blocks = whole(names)
    if kind is JobKind.STORE:
        engine.compute(blocks)
    stack.submit(stack.job(kind, [blocks]))
    while not (results := stack.step()):
        assert stack.wait(20)
    assert not engine.wrong(blocks)
    return set(statuses(results[0]))


def test_a_wrong_byte_is_found_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = FSBackend.load

    async def flip(self: FSBackend, job: TransferJob) -> JobResult:
        result = await honest(self, job)
        self._context.rows.view[job.groups[0].rows[0], -1] ^= 1  # type: ignore[union-attr]
        return result

    monkeypatch.setattr(FSBackend, "load", flip)
    result = bench(write(tmp_path, disk(tmp_path / "root")), "--layout", "full:page=16KiB")
    assert result.exit_code == 1
    assert "WRONG" in result.output
    assert not list(tmp_path.glob(f"{PREFIX}*"))


def test_a_block_that_does_not_come_back_is_one_line_that_names_the_tier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def lose(self: FSBackend, job: TransferJob) -> JobResult:
        return JobResult.uniform(job, MISSING)

    monkeypatch.setattr(FSBackend, "load", lose)
    result = bench(write(tmp_path, disk(tmp_path / "root")), "--layout", "full:page=16KiB")
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: tier fs, {tmp_path / 'root'}: ")
    assert "missing of" in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("lower", "arguments", "told"),
    [
        ("  - {type: fs, roots: [/nowhere/at/all], capacity: 1GiB}", (), "error: /nowhere/at/all cannot be reached"),
        ("", ("--sizes", "ten"), "error: --sizes: 'ten' is not a size"),
        ("", ("--json", "/nowhere/at.json"), "error: --json: cannot write /nowhere/at.json"),
        ("", ("--seconds", "0"), "error: Invalid value for '--seconds'"),
    ],
)
def test_what_cannot_be_measured_is_one_line(tmp_path: Path, lower: str, arguments: tuple[str, ...], told: str) -> None:
    result = bench(write(tmp_path, lower), "--layout", "full:page=16KiB", *arguments)
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith(told)
    assert len(result.stderr.splitlines()) == 1


def test_a_root_whose_parent_is_no_place_to_write_gets_its_folder_inside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "root"
    root.mkdir()
    monkeypatch.setattr(os, "access", lambda *_: False)
    with folder_beside(str(root)) as own:
        assert Path(own).parent.parent == root
    assert list(root.iterdir()) == []
    with pytest.raises(ConfigError, match="no temporary folder"), folder_beside("/proc/1/root-of-nobody"):
        pass


def test_a_machine_that_does_not_name_its_processor_is_reported_by_its_architecture(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read = Path.read_text

    def absent(self: Path, *arguments: Any, **options: Any) -> str:
        if self == Path("/proc/cpuinfo"):
            raise FileNotFoundError(self)
        return read(self, *arguments, **options)

    monkeypatch.setattr(Path, "read_text", absent)
    assert machine()["cpu"] == platform.machine()


def test_a_bar_is_as_long_as_its_share() -> None:
    assert [len(bar(share)) for share in (0.0, 0.5, 1.0, 2.0)] == [0, BAR_CELLS // 2, BAR_CELLS, BAR_CELLS]

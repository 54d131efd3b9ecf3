"""`kvtier check`: the figures of a stack, or exit status 2 and one clear line for each error."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from support_backends import STANDARD, add_distribution
from support_tools import tool_as_ordinary_user

from faults.machine import warm
from kvtier.cli import main
from kvtier.options import count_text, size_text

LAYOUT = "full:page=32KiB,block=16;sliding_window:page=16KiB,block=16,window=512"


def check(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["check", *map(str, arguments)])


def errors(*arguments: str | Path) -> list[str]:
    """The error lines of a check that must fail with 2 and print nothing else."""
    result = check(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    return result.stderr.splitlines()


@pytest.fixture
def stack(tmp_path: Path) -> Path:
    return tmp_path / "stack.yaml"


def write(stack: Path, tail: str, cpu: str = "64MiB") -> Path:
    stack.write_text(f"tiers:\n  - type: gpu\n  - {{type: cpu, cpu_bytes_to_use: {cpu}}}\n{tail}\n")
    return stack


def disk(root: Path, capacity: str = "1GiB", extra: str = "") -> str:
    return f"  - {{type: fs, roots: [{root}], capacity: {capacity}{extra}}}"


def test_the_figures_are_those_of_the_geometry(stack: Path) -> None:
    write(stack, "")
    result = check(stack, "--no-probe", "--json", "--layout", LAYOUT, "--world-size", "2", "--factor", "4")
    assert result.exit_code == 0, result.output
    plan = json.loads(result.stdout)
    assert plan["row_bytes"] == 32768 * 2 * 4
    assert (plan["world_size"], plan["block_size_factor"]) == (2, 4)
    assert [group["padding_bytes"] for group in plan["groups"]] == [0, 131072]
    assert [group["waste"] for group in plan["groups"]] == [0.0, 0.5]
    cpu = plan["tiers"][1]
    assert cpu["num_blocks"] == 256
    assert cpu["tokens"] == 256 * 64 // 2
    assert cpu["index_bytes"] == 256 * 220


def test_a_tier_that_answers_lookups_itself_has_no_index_in_memory(stack: Path) -> None:
    """A bucket of a fleet holds more blocks than the memory of a host could index."""
    bucket = "{type: s3, bucket: kv-cache, write_bytes_per_day: 2TiB, expire_days: 3, hosts: 100}"
    write(stack, f"  - {bucket}")
    result = check(stack, "--no-probe", "--json")
    assert result.exit_code == 0, result.output
    plan = json.loads(result.stdout)["tiers"][-1]
    assert plan["num_blocks"] > 1 << 20
    assert plan["index_bytes"] is None


def test_people_get_tables_with_every_tier_and_group(stack: Path) -> None:
    write(stack, "")
    result = check(stack, "--layout", LAYOUT)
    assert result.exit_code == 0, result.output
    for word in (
        "BLOCK_SIZE_ALIGNMENT",
        "num_blocks",
        "tokens held",
        "sliding_window",
        "50.0 %",
        "gpu",
        "cpu",
        "64 MiB",
    ):
        assert word in result.stdout


def test_the_factor_of_the_stack_file_counts_unless_the_option_is_given(stack: Path) -> None:
    write(stack, "block_size_factor: 8")
    assert json.loads(check(stack, "--json").stdout)["block_size_factor"] == 8
    assert json.loads(check(stack, "--json", "--factor", "2").stdout)["block_size_factor"] == 2


def test_a_stack_with_a_good_folder_passes(stack: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir(mode=0o700)
    write(stack, disk(root))
    before = sorted(root.rglob("*"))
    result = check(stack, "--json", "--layout", LAYOUT)
    assert result.exit_code == 0, result.output
    fs = json.loads(result.stdout)["tiers"][2]
    # Half the blocks are of each group, and a slot is a header page and the payload of its own group.
    assert 0.9 * (1 << 30) < fs["num_blocks"] // 2 * (4096 + 32768 + 4096 + 16384) <= 1 << 30
    assert fs["write_policy"] == "write_through"
    assert sorted(root.rglob("*")) == before, "check leaves nothing behind"


def test_the_schema_is_printed_without_a_stack() -> None:
    result = check("--schema")
    assert result.exit_code == 0
    schema = json.loads(result.stdout)
    kinds = [tier["properties"]["type"]["const"] for tier in schema["properties"]["tiers"]["items"]["oneOf"]]
    assert {"gpu", "cpu", "fs", "shared_fs", "valkey", "s3", "gcs", "azure"} <= set(kinds)


def test_without_a_stack_the_usage_is_explained() -> None:
    result = check()
    assert result.exit_code == 2
    assert "give a stack file" in result.stderr


def test_an_unknown_key_suggests_the_nearest(stack: Path) -> None:
    write(stack, "block_size_facter: 2")
    (line,) = errors(stack)
    assert line.startswith("error: block_size_facter: unknown key; did you mean 'block_size_factor'?")


def test_ten_bananas_say_what_is_accepted(stack: Path) -> None:
    (line,) = errors(write(stack, "", cpu="10 bananas"))
    assert line.startswith(
        "error: tiers[1].cpu_bytes_to_use: '10 bananas' is not a size; write a whole number of bytes"
    )


def test_a_budget_under_one_block_names_the_bytes_needed(stack: Path) -> None:
    (line,) = errors(write(stack, "", cpu="32767"), "--layout", LAYOUT)
    assert line.startswith("error: tiers[1].cpu_bytes_to_use: 32767 bytes hold no block: one block needs 32768 bytes")


def test_an_unknown_backend_lists_the_known_ones(stack: Path) -> None:
    (line,) = errors(write(stack, "  - {type: tape}"))
    assert line.startswith("error: tiers[2].type: no backend is called 'tape'")
    assert all(name in line for name in ("cpu", "fs", "gpu"))


def test_a_missing_file_and_a_bad_layout_are_one_line_each(stack: Path, tmp_path: Path) -> None:
    (line,) = errors(tmp_path / "absent.yaml")
    assert line.endswith("absent.yaml does not exist; give the path of a stack file")
    (line,) = errors(write(stack, ""), "--layout", "full:pag=1")
    assert line.startswith("error: layout.groups[0].pag: unknown key; did you mean 'page'?")


def test_several_mistakes_are_several_lines(stack: Path) -> None:
    found = errors(write(stack, "spare: 1\nmore: 2", cpu="x"))
    assert [line.split(": ")[1] for line in found] == ["spare", "more", "tiers[1].cpu_bytes_to_use"]


def test_rows_that_this_machine_can_never_have_are_told_by_a_probe_alone(stack: Path) -> None:
    write(stack, "", cpu="900TiB")
    (line,) = errors(stack)
    assert line.startswith("error: tiers[1].cpu_bytes_to_use: needs 900.")
    assert line.endswith(" at most")
    assert check(stack, "--no-probe").exit_code == 0


def test_a_user_that_this_host_lacks_is_named(stack: Path, tmp_path: Path) -> None:
    write(stack, f"{disk(tmp_path)}\nallow: [no-such-user]")
    assert errors(stack) == ["error: allow: there is no user 'no-such-user' on this host"]
    assert check(stack, "--no-probe").exit_code == 0


def test_a_missing_folder_says_which_and_what_to_do(stack: Path, tmp_path: Path) -> None:
    root = tmp_path / "no" / "such" / "folder"
    (line,) = errors(write(stack, disk(root)))
    assert line.startswith("error: tiers[2]")
    assert str(root) in line
    assert not root.parent.exists()


def test_a_folder_without_permission_says_which_and_what_to_do(stack: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir(mode=0o500)
    write(stack, disk(root))
    done = tool_as_ordinary_user("check", stack)
    assert done.returncode == 2, done.stdout + done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: tiers[2]")
    assert str(root) in line
    assert "permission" in line.lower()


def test_a_root_owned_by_another_process_names_its_owner(stack: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir(mode=0o700)
    code = """
import asyncio, sys, time
from types import SimpleNamespace
import numpy as np
from kvtier.config import build_tiers, parse_stack
from kvtier.types.geometry import Geometry, GroupLayout, KVLayout, TensorRef
from kvtier.tier.contract import TierContext
from kvtier.types.namespace import Namespace
layout = KVLayout((GroupLayout((TensorRef(0, 32768),)),))
text = f"tiers: [{{type: cpu, cpu_bytes_to_use: 1MiB}}, {{type: fs, roots: [{sys.argv[1]}], capacity: 1GiB}}]"
async def own():
    tier = build_tiers(parse_stack(text))[1]
    rows = SimpleNamespace(num_rows=1, row_bytes=32768, view=np.zeros((1, 32768), np.uint8))
    rows.checksum = rows.set_checksum = None
    await tier.open(TierContext("fs", Geometry(layout, 4096), Namespace(layout), time.monotonic, rows=rows))
    print("open", flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await tier.close()
asyncio.run(own())
"""
    owner = warm.Popen([sys.executable, "-c", code, root], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "open\n"
        (line,) = errors(write(stack, disk(root)))
    assert owner.returncode == 0
    assert str(root) in line
    assert str(owner.pid) in line


def test_a_backend_of_another_distribution_is_used_like_our_own(
    stack: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_distribution(tmp_path / "site", "third-party", {"tape": STANDARD["probed"]})
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    write(stack, "  - {type: tape, roots: [/a], capacity: 8MiB}")
    result = check(stack, "--json", "--layout", LAYOUT)
    assert result.exit_code == 0, result.output
    plan = json.loads(result.stdout)
    assert plan["alignment"] % 12288 == 0
    assert plan["tiers"][2]["mode"] == "direct"
    stack.write_text(stack.read_text().replace("/a", "/x/bad"))
    assert errors(stack, "--layout", LAYOUT) == ["error: tiers[2]: /x/bad: does not exist; create it"]
    assert check(stack, "--no-probe", "--layout", LAYOUT).exit_code == 0


def test_the_version_is_the_installed_one() -> None:
    result = CliRunner().invoke(main, ["--version"])
    assert result.exit_code == 0
    assert result.output.startswith("kvtier, version ")


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.50 KiB"),
        (64 << 30, "64 GiB"),
        ((1 << 40) - 1, "1023.99 GiB"),
        (5 << 60, "5120 PiB"),
    ],
)
def test_sizes_are_short_and_never_rounded_up(size_bytes: int, text: str) -> None:
    assert size_text(size_bytes) == text


def test_counts_have_separators() -> None:
    assert count_text(1048576) == "1,048,576"

"""Stack files with the tier `mooncake`: validated without the library, and one line for each mistake."""

from __future__ import annotations

import importlib.util

import pytest
from click.testing import CliRunner

from kvtier.cli import main
from kvtier_remote.mooncake.client_process import outcome_of
from kvtier_remote.mooncake.options import CONNECTIONS, MooncakeOptions

MASTER = {"type": "mooncake", "master": "mooncake-master:50051"}


def test_what_a_file_need_not_say():
    options = MooncakeOptions.model_validate(MASTER)
    assert (options.protocol, options.replicas, options.tenant) == ("tcp", 1, "default")
    assert CONNECTIONS * options.batch_bytes < options.staging == 64 << 20


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"master": "mooncake-master"}, "write host:port"),
        ({"devices": "mlx5_0"}, "devices are those of protocol: rdma"),
        ({"protocol": "ib"}, "'tcp' or 'rdma'"),
        ({"staging": "1MiB"}, "greater than or equal to"),
        ({"tenant": "a/b"}, "pattern"),
        ({"password": "x"}, "a stack file holds no secret"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_a_mistake_is_named(changes, words):
    with pytest.raises(ValueError, match=words):
        MooncakeOptions.model_validate(MASTER | changes)


@pytest.fixture
def stack(tmp_path):
    file = tmp_path / "stack.yaml"
    tiers = "- type: gpu\n  - {type: cpu, cpu_bytes_to_use: 64MiB}\n  - {type: mooncake, master: 'cache.example:50051'}"
    file.write_text(f"tiers:\n  {tiers}\n")
    return file


def without_the_library(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "mooncake" else find(name, *more)
    )


def test_a_file_is_checked_without_the_library_and_says_what_to_install(stack, monkeypatch):
    without_the_library(monkeypatch)
    result = CliRunner().invoke(main, ["check", "--no-probe", str(stack)])
    assert result.exit_code == 0, result.output
    assert "kvtier[mooncake]" in result.output
    assert "the pool's size is not known here" in result.output
    assert "PiB" not in result.output
    probed = CliRunner().invoke(main, ["check", str(stack)])
    assert probed.exit_code == 2
    (line,) = probed.stderr.splitlines()
    assert "tiers[2].type: needs the package mooncake-transfer-engine-non-cuda" in line


def test_codes_of_the_library_are_outcomes():
    found = {code: outcome_of(code) for code in (-704, -703, -200, -601, -707, -800, -900)}
    assert [str(one.status) for one in found.values()] == ["missing"] * 2 + ["dropped"] * 2 + ["failed"] * 3
    assert (found[-200].reason, found[-601].reason) == ("disk_full", "in_flight")

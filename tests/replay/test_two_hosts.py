"""Replays in processes of their own, each a host with its own CPU tier and disk, over one server that they share."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from support_counts import fully
from support_valkey import Server, valkey_server

from faults.machine import warm

SIZES = ("--block-bytes", "4KiB", "--requests", "60", "--cpu-blocks", "100", "--fs-blocks", "200")
RUN_SECONDS = 240


class Host:
    """A replay in a process of its own, over a disk of its own and a server that it shares."""

    def __init__(self, folder: Path, server: Server) -> None:
        folder.mkdir()
        self._figures = folder / "figures.json"
        stack = folder / "stack.yaml"
        times = "request_timeout_seconds: 20, job_timeout_seconds: 40"
        stack.write_text(
            "lookup_timeout_seconds: 40\n"
            "tiers:\n- {type: gpu}\n- {type: cpu, cpu_bytes_to_use: 1MiB}\n"
            f"- {{type: fs, roots: [{folder / 'fs'}], capacity: 64MiB}}\n"
            f"- {{type: valkey, servers: ['{server.address}'], tls: false, {times}}}\n"
        )
        command = [sys.executable, "-c", "from kvtier.cli import main; main()", "replay", str(stack), *SIZES]
        piped = subprocess.PIPE
        self._process = warm.Popen([*command, "--json", self._figures], stdout=piped, stderr=piped, text=True)

    def figures(self) -> dict[str, Any]:
        """What the replay reports. Every byte that it loaded was right."""
        output, errors = self._process.communicate(timeout=RUN_SECONDS)
        assert self._process.returncode == 0, output + errors
        found: dict[str, Any] = json.loads(self._figures.read_text())
        assert found["blocks"]["mismatched"] == 0
        assert found["blocks"]["verified"] == found["blocks"]["loaded"] > 0
        return found


def test_what_one_host_stored_others_hit_and_every_byte_is_right(tmp_path: Path) -> None:
    with valkey_server() as server:
        first = Host(tmp_path / "a", server).figures()
        others = [Host(tmp_path / name, server) for name in "bc"]
        found = [other.figures() for other in others]
    assert first["blocks"]["loaded_of_recovered"] == 0
    for host in found:
        assert host["blocks"]["loaded_of_recovered"] > 0, "blocks that this host has not stored"
        assert host["hit_tokens"]["valkey"] > first["hit_tokens"]["valkey"]
        assert sum(host["hit_tokens"].values()) > sum(first["hit_tokens"].values())
        assert host["blocks"]["computed"] < first["blocks"]["computed"] / 2


@fully
def test_hosts_without_a_server_in_common_share_nothing(tmp_path: Path) -> None:
    """So the hits of the other test come from the server."""
    with valkey_server() as one, valkey_server() as other:
        first = Host(tmp_path / "a", one).figures()
        second = Host(tmp_path / "b", other).figures()
    assert second["blocks"]["loaded_of_recovered"] == 0
    assert second["blocks"]["computed"] == first["blocks"]["computed"]

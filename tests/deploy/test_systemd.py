"""The unit of `kvtier serve` under a real systemd: the manager of a user, in a mount namespace of its own."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support_paths import PROJECT
from support_service import TestEngine, peer_pid, stack_text, until

UNIT = PROJECT / "examples" / "deploy" / "kvtier@.service"
SYSTEMD = "/lib/systemd/systemd"
START = (
    f"mkdir -p /run/systemd && mount -t tmpfs tmpfs /run/systemd && mkdir /run/systemd/system && exec {SYSTEMD} --user"
)
OF_THE_SYSTEM = ("User=", "RuntimeDirectory", "Protect", "ReadWritePaths=", "PrivateTmp=", "OOMScoreAdjust=", "After=")
"""Lines of the unit that the manager of a user cannot follow, or that would hide the test's folder."""

pytestmark = [
    pytest.mark.skipif(not Path(SYSTEMD).exists() or not shutil.which("unshare"), reason="systemd is not installed"),
    pytest.mark.skipif(os.geteuid() != 0, reason="a mount namespace for systemd needs root"),
]


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder of a short path."""
    with tempfile.TemporaryDirectory() as found:
        yield Path(found)


@pytest.fixture
def systemctl(folder: Path) -> Iterator[Callable[..., str]]:
    """`systemctl --user` for a manager that runs for the test, with what it printed."""
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(folder), "SYSTEMD_LOG_TARGET": "console"}
    log = folder / "systemd.log"
    with log.open("w") as out:
        manager = subprocess.Popen(["unshare", "-m", "bash", "-c", START], env=environment, stdout=out, stderr=out)

    def call(*words: str) -> str:
        command = ["systemctl", "--user", *words]
        run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert run.returncode == 0, (words, run.stderr, log.read_text())
        return run.stdout

    try:
        until(lambda: (folder / "systemd" / "private").exists() or manager.poll() is not None, "systemd serves")
        if manager.poll() is not None:
            pytest.skip(f"systemd does not run here: {log.read_text()[-200:]}")
        yield call
        call("stop", "kvtier@test.service")
    finally:
        manager.kill()
        manager.wait(30)


def test_rows_outlive_a_crash_and_a_restart_of_the_unit(folder: Path, systemctl: Callable[..., str]) -> None:
    stack, path = folder / "test.yaml", str(folder / "socket")
    stack.write_text(stack_text(256))
    text = UNIT.read_text().replace("/etc/kvtier/%i.yaml", str(stack)).replace("/run/kvtier/%i/socket", path)
    text = text.replace("/opt/kvtier/bin/kvtier", f"{sys.executable} -c 'from kvtier.cli import main; main()'")
    units = folder / "systemd" / "user"
    units.mkdir(parents=True, exist_ok=True)
    lines = [line for line in text.splitlines() if not line.startswith(OF_THE_SYSTEM)]
    (units / "kvtier@.service").write_text("\n".join(lines))
    systemctl("daemon-reload")
    systemctl("start", "kvtier@test.service")  # returns once it is ready
    with TestEngine(path) as engine:
        assert engine.store(range(32)) == ["stored"] * 32
        for life in range(2):
            before = peer_pid(path)
            if life:
                systemctl("restart", "kvtier@test.service")
            else:
                os.kill(before, signal.SIGKILL)
            engine.step_until(lambda: not engine.client.core.connected, "the end is seen")
            engine.step_until(lambda: engine.client.core.joined, "the engine has joined again")
            assert peer_pid(path) != before
            assert engine.load(range(32), f"r{life}") == ["hit"] * 32
        assert "NFileDescriptorStore=3" in systemctl("show", "kvtier@test.service", "-p", "NFileDescriptorStore")

"""`kvtier ping | status | engines | reset` at a real `kvtier serve`."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from support_served import served
from support_service import NAMESPACE, PAGE, TestEngine, stack_process, stack_text, until

from faults.machine import warm
from kvtier.cli import main
from kvtier.service import connected
from kvtier.service.channel import send_greeting
from kvtier.service.connected import OTHERS
from kvtier.service.wire import Inquiry
from kvtier.stack.watching.stats import EngineStats
from kvtier.tools.commands import operate

EXAMPLE = str(Path(__file__).parents[2] / "examples" / "engine_at_service.py")


def run(*words: str, status: int = 0) -> str:
    found = CliRunner().invoke(main, words)
    assert found.exit_code == status, (words, found.output)
    return found.output


def asked(path: str, what: str, *about: str) -> dict:
    return json.loads(run(what, *about, path, "--json"))


def test_an_operator_sees_engines_and_rows_and_resets_them(tmp_path):
    stack, path = tmp_path / "stack.yaml", str(tmp_path / "socket")
    stack.write_text(stack_text(256, tmp_path / "root"))
    run("ping", path, "--timeout", "1", status=2)
    run("ping", path, "--wait", "--timeout", "0.1", status=2)
    waiting = warm.Popen([sys.executable, "-c", "from kvtier.cli import main; main()", "ping", "--wait", path])
    with stack_process(stack, path):
        assert waiting.wait(60.0) == 0
        assert not asked(path, "ping")["ready"]
        assert "no engine yet" in run("ping", path)
        assert "none yet" in run("status", path)
        assert asked(path, "engines")["listed"] == []
        run("reset", path, status=2)
        with TestEngine(path, "one") as one, TestEngine(path, "two") as two:
            assert one.store(range(16)) == ["stored"] * 16
            assert two.load(range(16)) == ["hit"] * 16
            assert asked(path, "ping") == asked(path, "ping") | {"ready": True, "engines": 2, "protocol": 1}
            status = asked(path, "status")
            assert (status["rows"]["ready"], status["row_bytes"]) == (16, PAGE)
            assert sum(status["rows"].values()) == 256
            assert status["tiers"]["cpu"]["used_bytes"] >= 16 * PAGE
            assert "16 ready" in run("status", path)
            listed = {engine["name"]: engine for engine in asked(path, "engines")["listed"]}
            assert {name: engine["state"] for name, engine in listed.items()} == {"one": "served", "two": "served"}
            assert listed["one"]["lent_rows"] == len(one.client.core._lent)
            assert listed["one"]["namespace"] == f"test ({NAMESPACE.digest().hex()})"
            assert "served" in run("engines", path)
            shown = {row["engine"]: row for row in json.loads(run("top", path, "--once", "--json"))["engines"]}
            assert (shown["two"]["hit_share"], shown["one"]["hit_share"]) == (1.0, None)
            assert shown["one"]["held_rows"] == listed["one"]["held_rows"]
            assert "stores/s" in run("top", path, "--once", "--interval", "0")
            assert run("reset", path) == "nothing stored before is found any more\n"
            assert one.load(range(16), "a") == ["missing"] * 16
            assert two.load(range(16), "b") == ["missing"] * 16
            assert one.store(range(16)) == ["stored"] * 16
            assert two.load(range(16), "c") == ["hit"] * 16


def test_a_reset_that_is_not_durable_is_an_error_in_both_forms(monkeypatch):
    fault = "the reset of tier fs is not durable"
    monkeypatch.setattr(operate, "inquire", lambda *_: {"fault": fault})
    assert run("reset", "socket", status=1) == f"{fault}\n"
    assert json.loads(run("reset", "socket", "--json", status=1))["fault"] == fault
    monkeypatch.setattr(operate, "inquire", lambda *_: {"fault": ""})
    run("reset", "socket")
    run("reset", "socket", "--json")


def test_the_example_stores_and_the_next_engine_loads(tmp_path):
    stack, path = tmp_path / "stack.yaml", str(tmp_path / "socket")
    stack.write_text(stack_text(64))
    command = [sys.executable, EXAMPLE, path]
    with stack_process(stack, path):
        lives = [warm.run(command, capture_output=True, text=True, timeout=60) for _ in range(2)]
        assert [life.stdout for life in lives] == ["stored\n", "loaded\n"], [life.stderr for life in lives]


@pytest.mark.parametrize("what", ["", "leave", "x" * 1000])
def test_an_inquiry_that_is_none_is_refused(tmp_path, what):
    stack, path = tmp_path / "stack.yaml", str(tmp_path / "socket")
    stack.write_text(stack_text(64))
    with stack_process(stack, path):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.connect(path)
            send_greeting(sock, Inquiry(what))
            sock.settimeout(10)
            assert b"nothing to" in sock.recv(1 << 16)
        assert "protocol" in run("ping", path)


def test_figures_of_engines_are_counted_by_name_also_when_they_are_gone(tmp_path, monkeypatch):
    monkeypatch.setattr(connected, "NAMES_MAX", 4)
    found: dict[str, EngineStats] = {}
    with served(tmp_path, stack_text(64)) as service:

        def figures() -> dict[str, EngineStats]:
            return service.server.stats().engines

        for life in range(2):
            with TestEngine(service.path, "again") as engine, TestEngine(service.path, "other") as other:
                assert engine.store(range(8 * life, 8 * life + 8)) == ["stored"] * 8
                assert other.load(range(8)) == ["hit"] * 8
                assert figures()["again"].held_rows > 0
            until(lambda: service.engines == 0, "they are gone")
            found = figures()
        assert (found["again"].stored, found["again"].held_rows) == (16, 0)
        assert (found["other"].looked_up, found["other"].loaded) == (16, {"cpu": 16})
        for number in range(6):
            with TestEngine(service.path, f"e{number}") as engine:
                engine.look(range(4))
            until(lambda: service.engines == 0, "it is gone")
        found = figures()
        assert len(found) == 5
        assert found[OTHERS].stored == 16
        assert sum(each.loaded.get("cpu", 0) for each in found.values()) == 16

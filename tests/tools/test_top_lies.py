"""`kvtier top` of an endpoint that lies: figures or one line, in bounded time, and nothing of it steers the terminal.

Only the command is used, so this holds for whatever it draws.
"""

from __future__ import annotations

import copy
import json
import os
import pty
import re
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import cycle
from pathlib import Path
from random import Random
from subprocess import Popen
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from support_counts import full_alone
from support_driver import ServedStack
from support_stack import PLAIN, Engine, parts_of, stack_file
from support_tools import tool

from kvtier.metrics.exporter import StackCollector
from kvtier.tools import top

STEERS = "\x1b]0;pwned\x07\x1b[2J\x9b31m\u202e\r\n\x00"
VALUES: list[Any] = [float("nan"), float("inf"), float("-inf"), -1, -0.5, 1e308, 5e-324, 10**400, 1 << 70, True]
OTHERS: list[Any] = [None, "", STEERS, [], {}, [[]], {STEERS: STEERS}, [float("nan")] * 3, {"load": -1}]
ENDS_SECONDS = 60.0


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """What a stack says of itself, on its socket and on a page."""
    path = str(tmp_path_factory.mktemp("s") / "s")
    lower = {"type": "fs", "roots": [f"{path}-root"], "capacity": "8MiB", "min_free_bytes": 0, "direct": "off"}
    with ServedStack(parts_of(stack_file(PLAIN, 16, lower, stats_socket=path), Engine(PLAIN, 8))) as stack:
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(path)
            said = b"".join(iter(lambda: client.recv(1 << 16), b""))
        registry = CollectorRegistry()
        registry.register(StackCollector(stack.served.stats))
        return json.loads(said), generate_latest(registry).decode()


@contextmanager
def serving(listener: socket.socket, answer: Callable[[socket.socket], None]) -> Iterator[None]:
    """Answer each connection until the block ends."""
    listener.listen()
    ending = threading.Event()

    def serve() -> None:
        while not ending.is_set():
            with listener.accept()[0] as peer:
                try:
                    answer(peer)
                except OSError:  # it has heard enough
                    continue

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield
    finally:
        ending.set()
        with socket.socket(listener.family) as last:
            last.connect(listener.getsockname())
        thread.join()
        listener.close()


@contextmanager
def socket_saying(path: Path, *documents: object) -> Iterator[str]:
    """The path of a socket with these answers, in turn. Bytes are sent as they are."""
    answers = cycle([each if isinstance(each, bytes) else json.dumps(each).encode() for each in documents])
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    with serving(listener, lambda peer: peer.sendall(next(answers))):
        yield str(path)
    path.unlink()


@contextmanager
def page_saying(*pages: str | bytes, head: bytes = b"HTTP/1.0 200 OK\r\n\r\n") -> Iterator[str]:
    """The URL of a server with these answers, in turn."""
    answers = cycle([head + (each if isinstance(each, bytes) else each.encode()) for each in pages])

    def answer(peer: socket.socket) -> None:
        peer.recv(1 << 16)
        peer.sendall(next(answers))

    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    with serving(listener, answer):
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/metrics"


def no_constant(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")


def holds(address: str, interval: str = "0", status: int | None = None) -> str:
    """Whatever was answered: tables and JSON, or one line. Returns what was printed."""
    began = time.monotonic()
    shown = tool("top", address, "--once", "--interval", interval)
    document = tool("top", address, "--once", "--json", "--interval", interval)
    for result in (shown, document):
        assert result.exit_code in ((0, 2) if status is None else (status,)), (result.output, result.exception)
        assert all(sign.isprintable() or sign == "\n" for sign in result.output), result.output
        if result.exit_code == 2:
            assert (result.stdout, len(result.stderr.splitlines())) == ("", 1)
            assert result.stderr.startswith("error: ")
        else:
            assert result.stderr == ""
    if document.exit_code == 0:
        json.loads(document.stdout, parse_constant=no_constant)
    assert max(map(len, shown.output.splitlines()), default=0) < 1000
    assert time.monotonic() - began < ENDS_SECONDS
    return shown.output


Path_ = tuple[Any, ...]


def places(value: Any, at: Path_ = ()) -> Iterator[Path_]:
    """The place of everything in a document."""
    yield at
    if isinstance(value, dict | list):
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(each, (*at, key))


def changed(document: Any, at: Path_, value: Any) -> Any:
    """The document with one value replaced."""
    if not at:
        return value
    whole = copy.deepcopy(document)
    within = whole
    for key in at[:-1]:
        within = within[key]
    within[at[-1]] = value
    return whole


def test_the_truth_is_shown(truth, tmp_path: Path):
    with socket_saying(tmp_path / "s", truth[0]) as address:
        assert "fs" in holds(address, status=0)
    with page_saying(truth[1]) as address:
        assert "fs" in holds(address, status=0)


@pytest.mark.parametrize("interval", ["0", "0.001"])
def test_a_document_with_a_wrong_value_anywhere(truth, tmp_path: Path, seed: int, interval: str, dial):
    """Before and after the truth, so that rates are made of both."""
    rng, document = Random(seed), truth[0]
    for at in rng.sample(list(places(document)), dial(60, 20)):
        wrong = changed(document, at, rng.choice([*VALUES, *VALUES, *OTHERS]))
        later = {**document, "seconds": document["seconds"] + rng.choice([0, 1e-300, 1.0])}
        with socket_saying(tmp_path / "s", *rng.choice([(wrong, later), (document, wrong), (wrong, wrong)])) as address:
            holds(address, interval)


def test_every_figure_of_a_document_wrong_at_once(truth, tmp_path: Path):
    def all_of(value: Any, wrong: Any) -> Any:
        if isinstance(value, dict):
            return {key: all_of(each, wrong) for key, each in value.items()}
        if isinstance(value, list):
            return [all_of(each, wrong) for each in value]
        return wrong if isinstance(value, int | float) else value

    for wrong in VALUES:
        said = {**all_of(truth[0], wrong), "seconds": 1.0, "process": 1, "opened_at": 1.0}
        with socket_saying(tmp_path / "s", said, {**said, "seconds": 2.0}) as address:
            holds(address, "0.001")


@pytest.mark.parametrize("bounds", [[], [1.0], [2.0, 1.0], [1.0, float("nan")], [1.0] * 4000])
@pytest.mark.parametrize("counts", [[], [1], [1, 2, 3], [-1, 5]])
def test_odd_buckets_of_a_document(truth, tmp_path: Path, bounds, counts):
    document = copy.deepcopy(truth[0])
    odd = {"bounds": bounds, "counts": counts, "sums": [1.0] * len(counts)}
    for tier in document["stats"]["tiers"].values():
        for transfers in tier["transfers"].values():
            transfers["took_seconds"] = odd
    with socket_saying(tmp_path / "s", document, truth[0]) as address:
        holds(address, "0.001")


@pytest.mark.parametrize(
    "said",
    [b"[" * 200_000, b'{"stats":' * 100_000, b'{"stats": {"tiers": ' + b'{"a":' * 900, b"\xff" * 100, b"1" * 5000],
    ids=["lists", "mappings", "in the tiers", "no text", "a long number"],
)
def test_a_document_that_cannot_be_read_is_one_line(tmp_path: Path, said: bytes):
    with socket_saying(tmp_path / "s", said) as address:
        holds(address, status=2)


@pytest.mark.parametrize(
    "change",
    [
        lambda page: page.replace(" 0.0\n", " NaN\n"),
        lambda page: page.replace(" 0.0\n", " +Inf\n"),
        lambda page: page.replace(" 0.0\n", " -Inf\n"),
        lambda page: page.replace(" 0.0\n", " -7\n"),
        lambda page: page.replace(" 0.0\n", " 1e308\n") * 2,
        lambda page: page.replace('le="+Inf"', 'le="NaN"'),
        lambda page: page.replace('le="0.1"', 'le="much"'),
        lambda page: page.replace('le="', 'more="'),
        lambda page: page.replace('le="', 'le="-'),
        lambda page: re.sub(r'(le="\+Inf".*) 0\.0', r"\1 -3", page),
        lambda page: "\n".join(line for line in page.splitlines() if 'le="' not in line or 'le="0.5"' in line) + "\n",
        lambda page: page.replace('tier="fs"', 'tier=""'),
        lambda page: page.replace('tier="', 'kind="'),
    ],
)
def test_a_page_with_wrong_values(truth, change: Callable[[str], str]):
    wrong = change(truth[1])
    assert wrong != truth[1]
    with page_saying(wrong, truth[1]) as address:
        holds(address, "0.001")
    with page_saying(truth[1], wrong) as address:
        holds(address, "0.001")


def test_words_of_an_endpoint_steer_no_terminal(truth, tmp_path: Path):
    """In names of tiers, in states, in reasons, in what is no answer at all."""
    document, page = truth
    said = json.dumps(document).replace('"fs"', json.dumps(STEERS)).replace('"closed"', json.dumps(STEERS))
    said = said.replace('"disk_full"', json.dumps(STEERS)).replace('"stats"', '"stats"', 1)
    later = json.loads(said)
    tier = later["stats"]["tiers"][STEERS]
    tier["breaker"] = f"load {STEERS}, store {STEERS}"
    tier["dropped"] = {STEERS: 9}
    with socket_saying(tmp_path / "s", said.encode(), {**later, "seconds": later["seconds"] + 1}) as address:
        assert "?]0;pwned" in holds(address, "0.001", status=0)
    quoted = STEERS.replace("\n", "\\n").replace("\x00", "")
    words = page.replace('tier="fs"', f'tier="{quoted}"').replace('reason="disk_full"', f'reason="{quoted}"')
    with page_saying(words.replace("_total{", f'_total{{engine="{quoted}",')) as address:
        holds(address)
    for head in (
        STEERS.encode() + b"\r\n\r\n",
        b"HTTP/1.0 2" + STEERS.encode() * 9 + b"\r\n\r\n",
        b"HTTP/1.0 404 " + b"\x1b[2J\r\n\r\n",
    ):
        with page_saying(b"", head=head) as address:
            holds(address, status=2)


def test_a_live_screen_is_steered_by_nobody_else(truth, tmp_path: Path):
    said = json.dumps(truth[0]).replace('"fs"', json.dumps(STEERS)).replace('"closed"', json.dumps(STEERS)).encode()
    with socket_saying(tmp_path / "s", said) as address:
        terminal, of_child = pty.openpty()
        code = "from kvtier.cli import main; main(prog_name='kvtier')"
        words = [sys.executable, "-c", code, "top", address, "--interval", "0.05"]
        with Popen(
            words, stdin=of_child, stdout=of_child, stderr=of_child, env=os.environ | {"TERM": "xterm"}
        ) as child:
            os.close(of_child)
            drawn = b""
            while b"pwned" not in drawn:
                assert select.select([terminal], [], [], ENDS_SECONDS)[0], drawn
                drawn += os.read(terminal, 1 << 16)
            os.write(terminal, b"q")
            while child.poll() is None:
                with suppress(OSError):  # it has ended, and the terminal with it
                    if select.select([terminal], [], [], 0.1)[0]:
                        drawn += os.read(terminal, 1 << 16)
        os.close(terminal)
    assert child.returncode == 0
    for steers in ("\x1b]0;pwned", "\x9b31m", "\u202e"):
        assert steers.encode() not in drawn


@pytest.mark.parametrize("tiers", [150, *(pytest.param(count, marks=full_alone()) for count in (1_000, 10_000))])
def test_more_tiers_than_a_screen_has_lines_end(truth, tmp_path: Path, tiers: int):
    document, page = copy.deepcopy(truth[0]), truth[1]
    one = document["stats"]["tiers"]["fs"]
    document["stats"]["tiers"] = {f"t{number}": one for number in range(max(tiers, 1000))}
    with socket_saying(tmp_path / "s", document) as address:
        assert holds(address, status=2)
    lines = [f'kvtier_looked_up_blocks_total{{tier="t{number}"}} 1\n' for number in range(tiers)]
    with page_saying("# TYPE kvtier_looked_up_blocks counter\n" + "".join(lines)) as address:
        holds(address)
    many = "".join(
        line.replace('tier="fs"', f'tier="t{number}"')
        for number in range(tiers // 10)
        for line in page.splitlines(True)
    )
    with page_saying(many) as address:
        holds(address)


def test_a_page_without_an_end_or_of_endless_lines_is_one_line(monkeypatch: pytest.MonkeyPatch):
    for page in (b"kvtier_a 1\n" * (1 << 19), b"kvtier_a{" + b'b="c",' * (1 << 17) + b"} 1\n", b"a" * (17 << 20)):
        with page_saying(page) as address:
            assert "more than" in holds(address, status=2)
    monkeypatch.setattr(top, "TIMEOUT_SECONDS", 0.5)
    ending = threading.Event()

    def drip(peer: socket.socket, head: bytes) -> None:
        peer.sendall(head)
        while not ending.wait(0.02):
            peer.sendall(b"a")

    for head in (b"HTTP/1.0 200 OK\r\n\r\n", b"HTTP/1.0 200 OK\r\nX: ", b"HTTP/1.0"):
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        with serving(listener, lambda peer, head=head: drip(peer, head)):  # type: ignore[misc]
            ending.clear()
            try:
                result = tool(
                    "top", f"http://127.0.0.1:{listener.getsockname()[1]}/metrics", "--once", "--interval", "0"
                )
                assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
                assert "it does not end" in result.stderr
            finally:
                ending.set()

"""Makes the recording in tests/service/recorded: a life of an engine at a stack process, as a proxy between saw it.

`PYTHONPATH=.:tests/support python tests/support/make_conversation.py` writes it. A protocol that a release has spoken
keeps its recording as it is: that is for the next release to read. Another protocol gets one of its own.
"""

from __future__ import annotations

import os
import selectors
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints
from unittest.mock import patch

import msgspec
import torch
from support_conversation import CUT, ENGINE, INCARNATION, RECORDING, SERVICE, Area, Entry, Recording, differences
from support_served import Served, served
from support_service import NAMESPACE, PAGE, SECONDS, block_keys, content, stack_text

from kvtier.client import engine
from kvtier.client.connection import Identity
from kvtier.client.request import ClientRequest
from kvtier.client.stack_client import StackClient
from kvtier.service import wire
from kvtier.service.wire import Codec, Hello, Item
from kvtier.tier.contract import LookupResult
from kvtier.tier.registry import discover
from kvtier.types.gpu_runs import GPURuns
from kvtier.types.hints import Retain
from kvtier.types.jobs import GPUGroup, JobKind, TransferJob
from kvtier.types.keys import GroupIndex, JobId
from kvtier.types.requests import RequestInfo

ROWS, BLOCKS = 32, 4
"""Few rows, so that few are lent at once."""
STACK = stack_text(ROWS)


class RecordedLife:
    """The life of an engine, whose outcomes and items follow from what it is sent. `cut` ends its connections once.

    It sends nothing before all has come that follows from what it sent before.
    """

    def __init__(self, path: str, cut: Callable[[], None]) -> None:
        self.outcomes: list[Any] = []
        self._cut = cut
        self._came: list[Item] = []
        self._cache = torch.zeros((BLOCKS, PAGE), dtype=torch.uint8)
        gpu = discover().get("gpu")
        identity = Identity(path, NAMESPACE, "engine", "token")
        self._last_job = 0
        self._client = StackClient(identity, [self._cache], gpu(gpu.Options(type="gpu")))
        self._take_in = self._client.core.take_in

    def run(self) -> None:
        """Live to the end."""
        client = self._client
        with ExitStack() as stack:
            stack.callback(client.close)
            stack.enter_context(patch.object(client.core, "take_in", self._keep))
            stack.enter_context(patch.object(client, "_ask", partial(client._ask, timeout_seconds=SECONDS)))
            stack.enter_context(patch.object(client._worker._connection, "compare", self._compare))
            for part in (self._store, self._use, self._ask, self._follow, self._resume, self._reset, self._leave):
                part()

    def _keep(self, items: Sequence[Any]) -> None:
        self._came += items
        self._take_in(items)

    @staticmethod
    async def _compare() -> int:
        return wire.UNCHANGED

    # -- steps ---------------------------------------------------------------------------------------------------

    def _until(self, true: Callable[[], object]) -> None:
        """Step, once at least, until this is true."""
        client = self._client
        while True:
            self.outcomes += [
                [str(outcome.reason or outcome.status) for group in result.outcomes for outcome in group]
                for result in client.step()
            ]
            if true():
                return
            assert client.core.connected, "the connection has ended"
            assert client.wait(SECONDS), "nothing came"

    def _until_came(self, *kinds: type[Item]) -> None:
        """One item of each of these kinds has come, since this was called last."""
        self._until(lambda: set(kinds) <= set(map(type, self._came)))
        self._came.clear()

    def _job(self, kind: JobKind, numbers: range, request: ClientRequest | None = None) -> int:
        runs = GPURuns.whole(list(range(len(numbers))))
        keys = block_keys(len(numbers), numbers.start)
        self._last_job += 1
        job = TransferJob(JobId(self._last_job), kind, (GPUGroup(GroupIndex(0), keys, runs),))
        self._client.transfers.submit(job, request, 0.0)
        return job.job_id

    def _begin_store(self, numbers: range) -> None:
        self._cache[: len(numbers)] = content(numbers)
        self._job(JobKind.STORE, numbers)

    def _load(self, numbers: range, request: ClientRequest) -> None:
        """Load what is leased to a request."""
        self._cache.zero_()
        self._job(JobKind.LOAD, numbers, request)
        self._until_came(wire.Ended)
        self._until(lambda: not self._client.has_pending_work)
        self.outcomes.append(torch.equal(self._cache[: len(numbers)], content(numbers)))

    def _found(self, request: ClientRequest, numbers: range) -> None:
        """A request asks for blocks."""
        keys = block_keys(len(numbers), numbers.start)
        self._client.core.ask(request, keys)
        self._until_came(wire.Found)
        self._add(self._client.core.lookup(request, keys))

    def _add(self, found: Sequence[LookupResult]) -> None:
        self.outcomes.append([each.name for each in found])

    # -- parts ---------------------------------------------------------------------------------------------------

    def _store(self) -> None:
        """Stores without a row, then with one; those that wait for the engine's word, which is a good one once."""
        client, core = self._client, self._client.core
        self._begin_store(range(2))
        self._until_came(wire.Lent, wire.Ended)
        waiting = partial(core.begin_store, waits=True)
        for first, errno in ((2, 0), (3, 5)):
            with patch.object(core, "begin_store", waiting):
                self._begin_store(range(first, first + 1))
                self._until(lambda: core._unsure)
            core.end_store(next(iter(core._unsure)), errno)
            self._until_came(wire.Ended)
        self._until(lambda: not client.has_pending_work)

    def _use(self) -> None:
        """A request finds blocks, is followed by policies, loads; another one reserves and lets go."""
        client, keys = self._client, block_keys(4)
        request = client.core.request("a", (), RequestInfo(session="s", priority=1))
        request.extend(keys[:3])
        request.extend(keys[3:])
        self._found(request, range(4))
        self._load(range(1, 3), request)
        client.touch(request, keys[:2])
        client.core.say(wire.Computed(64, 0.5, 0.25))
        request.end(3, input_tokens=96, prompt=keys)
        other = client.core.request("b")
        client.core.reserve(other, keys[:2])
        self._until_came(wire.Found)
        self._add(filter(None, map(other.answer, keys)))
        other.end()
        client.step()

    def _ask(self) -> None:
        """Questions without a request."""
        client, keys = self._client, block_keys(4)
        client.look(keys, ask=True)
        self._until(lambda: client._looks.served)
        self._add(client.look(keys, ask=True))
        self.outcomes.append(client.locate(keys))
        hinted = client.hint(Retain(keys, 60.0, "s"))
        self.outcomes.append([hinted.accepted, dict(hinted.refused)])
        self.outcomes.append(client.figures().decode())
        client.core.ask_stats(rests=True)
        self._until(lambda: not client.core.stats_pending)
        self.outcomes.append([[series.name, series.values] for series in client.core.series])
        number = client.core.ask_weights()
        self._until(lambda: number in client.core.verdicts)
        self.outcomes.append(client.core.verdicts[number])

    def _follow(self) -> None:
        """Events of what the tiers have, and once more of some of that."""
        client = self._client
        client.take_events()
        self._came.clear()
        self._until_came(wire.Events)
        client.announce(block_keys(2))
        self._until_came(wire.Events)
        for event in client.take_events():
            numbers = [int.from_bytes(key[:16], "big") for key in event.keys]
            self.outcomes.append([event.tier, event.medium, event.removed, numbers])

    def _resume(self) -> None:
        """The connections end, and others follow."""
        core = self._client.core
        self._cut()
        for is_connected in (False, True):
            while core.connected != is_connected:
                self._client.wait(SECONDS)
                self._client.step()
        self._until_came(wire.Joined)
        request = core.request("c")
        self._found(request, range(3))
        self._load(range(3), request)
        request.end()

    def _reset(self) -> None:
        """A reset; then weights are loaded, which is one too, and the end of blocks that outlive the engine."""
        client, request = self._client, self._client.core.request("d")
        client.reset(SECONDS)
        self._found(request, range(4))
        client._worker._thread.run(client._worker._connection.on_load, SECONDS)
        self._until(lambda: client.core.loaded_weights)
        client.reset(SECONDS)
        client.core.say(wire.HoldBack("other weights"))
        self._begin_store(range(2))
        self._until_came(wire.Ended)
        self._found(request, range(4))
        request.end()

    def _leave(self) -> None:
        """The engine leaves, its worker first."""
        client = self._client
        self.outcomes.append(list(client.leave(SECONDS)))
        client._worker.close()
        while client.core.connected:
            client.wait(SECONDS)
            client.step()


@contextmanager
def steady() -> Iterator[None]:
    """Nothing that an engine sends follows from the time."""
    with patch.object(engine, "WANT_SECONDS", 1e9):
        yield


# -- the recording ---------------------------------------------------------------------------------------------------


class Proxy:
    """Passes messages on between engines that connect to `path` and the stack process, and keeps them as entries.

    `wait` returns when the stack process has handled one."""

    def __init__(self, path: str, service: str, wait: Callable[[], object]) -> None:
        self.entries: list[Entry] = []
        self._service = service
        self._wait = wait
        self._cut = threading.Event()
        self._others: dict[socket.socket, tuple[socket.socket, Entry]] = {}
        self._count = 0
        self._area: Area | None = None
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listening.bind(path)
        self._listening.listen()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listening, selectors.EVENT_READ)

    def cut(self) -> None:
        """End all connections."""
        self._cut.set()

    def run(self, ended: threading.Event) -> None:
        """Pass on until then, and until every connection has ended."""
        while self._others or not ended.is_set():
            for key, _ in self._selector.select(0.01):
                sock: Any = key.fileobj
                if sock is self._listening:
                    self._greet(sock.accept()[0])
                elif sock in self._others:
                    self._pass_on(sock)
            if self._cut.is_set():
                self._cut.clear()
                for sock, (_, entry) in list(self._others.items()):
                    if entry.by == ENGINE:
                        self._end(sock, CUT)
        self._listening.close()

    def _greet(self, sock: socket.socket) -> None:
        message, descriptors, _, _ = socket.recv_fds(sock, wire.MESSAGE_BYTES_MAX, 8)
        service = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        service.connect(self._service)
        hello = wire.GREETING.decode(message)[1][0]
        assert isinstance(hello, Hello)
        for by, source, target in ((ENGINE, sock, service), (SERVICE, service, sock)):
            written: list[tuple[int, bytes]] = []
            if by == SERVICE:
                message, descriptors, _, _ = socket.recv_fds(source, wire.MESSAGE_BYTES_MAX, 8)
                written = self._look_at(descriptors)
            self.entries.append(Entry(self._count, hello.role, by, message, True, written))
            socket.send_fds(target, [message], descriptors)
            for fd in descriptors:
                os.close(fd)
            self._others[source] = target, Entry(self._count, hello.role, by)
            self._selector.register(source, selectors.EVENT_READ)
        self._count += 1

    def _look_at(self, descriptors: Sequence[int]) -> list[tuple[int, bytes]]:
        """What the stack process has written into the control area, with its last byte, when a worker is first given
        it."""
        if self._area is not None or not descriptors:
            return []
        self._area = Area(descriptors[1])
        seen = bytes(self._area.memory)
        return [*differences(bytes(len(seen)), seen), (len(seen) - 1, seen[-1:])]

    def _pass_on(self, sock: socket.socket) -> None:
        other, entry = self._others[sock]
        message = sock.recv(wire.MESSAGE_BYTES_MAX)
        if not message:
            self._end(sock, entry.by)
            return
        entry = short(replace(entry, message=message))
        self.entries.append(entry)
        other.send(entry.message)
        if entry.by == ENGINE:
            self._wait()

    def _end(self, sock: socket.socket, by: str) -> None:
        other, entry = self._others[sock]
        assert by != SERVICE, "the stack process has ended a connection"
        self.entries.append(Entry(entry.connection, entry.role, by))
        for each in (sock, other):
            del self._others[each]
            self._selector.unregister(each)
            each.close()


def short(entry: Entry) -> Entry:
    """The entry with little in its figures, which are long and of no moment here."""
    sequence, items = entry.decode()
    made: list[Item] = []
    for item in items:
        if isinstance(item, wire.Stats):
            item = wire.Stats([wire.MetricSeries(wire.COUNTER, "name", ["label"], [1.0])], item.last)
        elif isinstance(item, wire.FiguresPart):
            item = wire.FiguresPart(item.number, b"{}" if item.last else b"", item.last)
        made.append(item)
    return entry if made == items else replace(entry, message=Codec.encode(made, sequence)[0])


def handled(found: Served) -> Callable[[], object]:
    """A call that returns when the server has handled all that it was sent: its loop has gone round."""
    return lambda: [found.run(lambda: None) for _ in range(3)]


def record(folder: Path) -> tuple[list[Entry], list[Any]]:
    """The messages and the outcomes of a life at a stack process of this release."""
    with served(folder, STACK) as found, steady():
        found.server.incarnation = INCARNATION
        proxy, ended = Proxy(str(folder / "proxy"), found.path, handled(found)), threading.Event()
        thread = threading.Thread(target=proxy.run, args=(ended,))
        thread.start()
        try:
            life = RecordedLife(str(folder / "proxy"), proxy.cut)
            life.run()
        finally:
            ended.set()
            thread.join(SECONDS)
    return proxy.entries, life.outcomes


# -- examples --------------------------------------------------------------------------------------------------------

ITEMS: Sequence[type[Item]] = (*(*wire.FromEngine, *wire.ToEngine, *wire.FromWorker), *(*wire.ToWorker, *wire.Greeting))


def example(kind: Any, name: str = "", number: int = 1) -> Any:
    """A value of a type, of an item above all, with other values for other fields."""
    plain = {int: number, float: number + 0.5, bool: True, str: name, bytes: name.encode()}
    origin, args = get_origin(kind), get_args(kind)
    if kind in plain:
        return plain[kind]
    if isinstance(kind, UnionType):
        return example(args[0], name, number)
    if origin is list:
        return [example(args[0], name, number)]
    if origin is tuple:
        return tuple(example(each, name, number + at) for at, each in enumerate(args))
    if origin is dict:
        return {name: example(args[1], name, number)}
    hints = get_type_hints(kind)
    fields = enumerate(kind.__struct_fields__, number)
    return kind(**{field: example(hints[field], field, at) for at, field in fields})


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        entries, outcomes = record(Path(folder))
    examples = [(kind.__name__, list(kind.__struct_fields__), msgspec.msgpack.encode(example(kind))) for kind in ITEMS]
    Recording(entries, outcomes, examples).write(RECORDING)


if __name__ == "__main__":
    main()

"""A Valkey or Redis server as a transport: few threads with a client each, many values in a call."""

from __future__ import annotations

import asyncio
import errno
import os
import re
from collections.abc import Callable, Sequence
from itertools import islice
from typing import ClassVar, NamedTuple, TypeVar

from kvtier.aio.daemon_pool import DaemonPool
from kvtier.tier.shared_epoch import EPOCH_CEILING
from kvtier.types.jobs import BlockOutcome, DropReason, dropped
from kvtier_remote.answers import bytes_of, digits
from kvtier_remote.call_limit import CompletionDelay
from kvtier_remote.client_threads import ClientThreads
from kvtier_remote.guard import guarded
from kvtier_remote.transport import Marker, NameFormat, TransportInfo, Value, ValueRef, Verify
from kvtier_remote.valkey.calls import Connection, asked, get, lengths_of, parts_of, put, sizes_of
from kvtier_remote.valkey.cluster_nodes import ClusterNodes, of_slot, read_slots
from kvtier_remote.valkey.glide import Glide, connect, connect_again, library, outcome_of
from kvtier_remote.valkey.options import ValkeyOptions
from kvtier_remote.valkey.server_facts import info, look_at

_UNANSWERED_ERRORS = frozenset((errno.ETIMEDOUT, errno.ECONNRESET, errno.ENOTCONN, errno.EHOSTDOWN))
"""Of a call all of whose values end so its node has answered nothing."""
_SHARDS = 16
"""Nodes of a cluster that have clients of their own, whatever `connections` says; of more nodes some share them."""
_SWAP = """
local held = string.sub(redis.call('GET', KEYS[1]) or '', 1, 64)
if ARGV[2] ~= '' and held == ARGV[1] then
  redis.call('SET', KEYS[1], ARGV[2])
  return ARGV[2]
end
return held
"""
"""Returns what is under the name, of which no marker has more characters."""
_MARKER_BYTES_MAX = 64
_MARKER = re.compile(rb"([0-9A-Fa-f]{16}) ([0-9]{1,19})")
T = TypeVar("T")


class Shard(NamedTuple):
    """Threads and clients for some nodes of a cluster, or for the one server. Transfers and lookups have threads of
    their own, so that a question does not wait behind blocks."""

    transfers: ClientThreads[Connection]
    questions: ClientThreads[Connection]

    def renew(self) -> None:
        """Replace all clients before their next calls."""
        self.transfers.renew()
        self.questions.renew()


@guarded
class ValkeyTransport:
    """Each node of a cluster has clients that make calls to no other: once a call of a client was not answered, it
    answers late for the others too.

    A node that does not answer is left alone for a while: its blocks are dropped (tier_down) and absent, without a
    call. Beside the work it is tried again.
    """

    name_format: ClassVar[NameFormat] = NameFormat()
    batch_blocks: ClassVar[int] = 64
    batch_bytes: ClassVar[int] = 3 << 20
    hedges: ClassVar[bool] = False
    lease_seconds: ClassVar[float] = 120.0

    def __init__(self, options: ValkeyOptions) -> None:
        self._options = options
        self.concurrency = 2 * options.connections
        self._nodes = ClusterNodes()
        self.lateness = CompletionDelay()
        self._shards: list[Shard] = []
        self._looking = DaemonPool("kvtier-valkey-look", 1)
        self._trial: asyncio.Task[None] | None = None
        self._closed = False

    def _connect(self) -> Connection:
        return Connection(connect(self._options))

    def _reconnect(self) -> Connection:
        return Connection(connect_again(self._options))

    async def open(self) -> TransportInfo:
        """Connect. Raises ConfigError with the key of the option that is wrong, or that the server's bounds need."""
        facts = await self._looking.run(look_at, self._options, self._nodes)
        connections = self._options.connections
        shards = min(len(self._nodes.slots), max(_SHARDS, connections))
        self._shards = [self._shard(max(1, connections // shards)) for _ in range(shards)]
        for shard in self._shards:
            await shard.questions.open()
            await shard.transfers.open()
        return facts

    def _shard(self, connections: int) -> Shard:
        transfers = ClientThreads("kvtier-valkey", connections, self._connect, self._reconnect, self.lateness)
        return Shard(transfers, ClientThreads("kvtier-valkey-lookup", 1, self._connect, self._reconnect))

    async def close(self, timeout_seconds: float) -> int:
        """Disconnect after the requests in flight, each of which ends within its own time. Returns what is stuck."""
        self._closed = True
        if self._trial is not None:
            self._trial.cancel()
            await asyncio.wait([self._trial])
        lanes = [lane for shard in self._shards for lane in shard]
        closing = [*(lane.close(timeout_seconds) for lane in lanes), self._looking.close(timeout_seconds)]
        return sum(await asyncio.gather(*closing))

    # -- nodes ---------------------------------------------------------------------------------------------------

    def server_of(self, place: ValueRef) -> str:
        """The node of a cluster that has a value."""
        return self._nodes.node_of(place.name)

    def _shard_of(self, node: str) -> Shard:
        """Raises OSError once closed."""
        if self._closed:
            raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))
        return self._shards[self._nodes.number_of(node) % len(self._shards)]

    def _judge(self, node: str, answered: bool) -> None:
        if not self._closed and self._nodes.judge(node, answered, asyncio.get_running_loop().time()):
            self._shard_of(node).renew()

    def _poll(self) -> None:
        """Try a node that has been left alone long enough, beside the work."""
        if self._closed or not (self._trial is None or self._trial.done()):
            return
        due = self._nodes.due(asyncio.get_running_loop().time())
        if due is not None:
            self._trial = asyncio.create_task(self._try(due))

    async def _try(self, node: str) -> None:
        """Find out whether a node answers again, or another one has its slots. It gets a client of its own: a
        connection to a machine that went without a word stays silent when the machine is back."""
        live = next(one for one in self._nodes.slots if not self._nodes.is_down(one))
        slot, of_live = self._nodes.slots[node], self._nodes.slots[live]
        try:
            answer, answered = await self._looking.run(self._try_nodes, slot, of_live)
            self._nodes.learn(answer)
        except OSError:
            return
        if answered:
            self._shard_of(node).renew()
            self._nodes.judge(node, True, 0.0)

    def _try_nodes(self, slot: int, of_live: int) -> tuple[object, bool]:
        """A trial of the nodes: their slots, and an answer of the one that has a slot. Blocking. Raises OSError."""
        fresh = self._reconnect()
        try:
            answer = asked(fresh, lambda client: read_slots(client, of_live))
            try:
                asked(fresh, lambda client: client.custom_command(["PING"], route=of_slot(slot)))
            except OSError:
                return answer, False
            return answer, True
        finally:
            fresh.close()

    # -- blocks --------------------------------------------------------------------------------------------------

    async def present(self, places: Sequence[ValueRef]) -> Sequence[bool | None]:
        """True for each value whose names are all there with the right lengths. Payloads are not read."""
        self._poll()
        by_node: dict[str, list[ValueRef]] = {}
        for place in places:
            by_node.setdefault(self.server_of(place), []).append(place)
        nodes = [node for node in by_node if self._closed or not self._nodes.is_down(node)]
        answers = await asyncio.gather(*(self._present(node, by_node[node]) for node in nodes))
        errors = [answer for answer in answers if isinstance(answer, OSError)]
        if errors and len(errors) == len(by_node):
            raise errors[0]
        found: dict[ValueRef, bool | None] = dict.fromkeys(places, False)
        for node, answer in zip(nodes, answers, strict=True):
            some = by_node[node]
            found.update(dict.fromkeys(some) if isinstance(answer, OSError) else zip(some, answer, strict=True))
        return [found[place] for place in places]

    async def _present(self, node: str, places: Sequence[ValueRef]) -> list[bool] | OSError:
        """The presence of values of one node, or why it is not known."""
        parts = [parts_of(place) for place in places]
        names = [part.name for some in parts for part in some]
        try:
            seconds = self._options.job_timeout_seconds
            lengths = iter(await self._shard_of(node).questions.run(lambda one: lengths_of(one, names, seconds)))
        except OSError as error:
            self._judge(node, error.errno not in _UNANSWERED_ERRORS)
            return error
        self._judge(node, True)
        return [sizes_of(some) == list(islice(lengths, len(some))) for some in parts]

    async def get(self, values: Sequence[Value], verify: Verify) -> list[BlockOutcome]:
        """Read values. Bodies of split ones arrive in their rows, everything else is copied there."""
        return await self._move(values, lambda connection: get(connection, values, verify))

    async def put(self, values: Sequence[Value]) -> list[BlockOutcome]:
        """Write values, each on its own: a full server refuses some and takes others."""
        expire = self._options.expire_seconds
        return await self._move(values, lambda connection: put(connection, values, expire))

    async def _move(
        self, values: Sequence[Value], call: Callable[[Connection], list[BlockOutcome]]
    ) -> list[BlockOutcome]:
        node = self.server_of(values[0].place)
        left_alone = [dropped(DropReason.TIER_DOWN)] * len(values)

        def make(connection: Connection) -> list[BlockOutcome]:
            return left_alone if self._nodes.is_down(node) else call(connection)

        self._poll()
        if self._nodes.is_down(node) and not self._closed:
            return left_alone
        try:
            outcomes = await self._shard_of(node).transfers.run(make)
        except OSError as error:  # closed meanwhile
            outcomes = [outcome_of(error)] * len(values)
        if outcomes is not left_alone:
            self._judge(node, any(outcome.errno not in _UNANSWERED_ERRORS for outcome in outcomes))
        return outcomes

    async def remove(self, places: Sequence[ValueRef]) -> None:
        """Unlink the names of values."""
        by_node = self._nodes.by_node([part.name for place in places for part in parts_of(place)])
        for node, names in by_node.items():
            await self._shard_of(node).transfers.run(
                lambda connection, names=names: asked(connection, lambda client: client.unlink(names))  # type: ignore[misc]
            )

    # -- what describes a namespace or the server ------------------------------------------------------------------

    async def _question(self, name: str, request: Callable[[Glide], T]) -> T:
        """The answer to a request about a name. Raises OSError."""
        shard = self._shard_of(self._nodes.node_of(name))
        return await shard.questions.run(lambda connection: asked(connection, request))

    async def describe(self, name: str, text: str) -> None:
        """Set it once. It never expires."""
        once = library().ConditionalChange.ONLY_IF_DOES_NOT_EXIST
        await self._question(name, lambda client: client.set(name, text, conditional_set=once))

    async def evicted(self) -> int:
        """The evictions in the section `stats` of INFO, of a cluster the sum over its primaries. A split value has two
        names."""
        counts = await asyncio.gather(*map(self._read_evicted, self._nodes.slots))
        return sum(counts)

    async def _read_evicted(self, node: str) -> int:
        slot = self._nodes.slots[node]

        def ask(connection: Connection) -> int:
            fields = asked(connection, lambda client: info(client, library().InfoSection.STATS, slot))
            return digits(fields.get("evicted_keys", "0"))

        return await self._shard_of(node).transfers.run(ask)

    async def read_marker(self, name: str) -> Marker | None:
        """By a script, which returns little whatever is there."""
        return marker_of(await self._swap(name, b"", b""))

    async def swap_marker(self, name: str, held: Marker | None, marker: Marker) -> Marker | None:
        """By a script, which the server runs as one step. The marker never expires."""
        there = await self._swap(name, b"", b"")
        if marker_of(there) == held:
            there = await self._swap(name, there, f"{marker.incarnation.hex()} {marker.epoch}".encode())
        return marker_of(there)

    async def _swap(self, name: str, held: bytes, wanted: bytes) -> bytes:
        words: list[str | bytes] = ["EVAL", _SWAP, "1", name, held, wanted]
        answer = await self._question(name, lambda client: client.custom_command(words))
        return bytes_of(answer, _MARKER_BYTES_MAX)

    async def keep_lease(self, marker: str, lease: str) -> None:
        """Set it with an expiry, on the node that has it."""
        glide = library()
        expiry = glide.ExpirySet(glide.ExpiryType.SEC, int(self.lease_seconds))
        await self.read_marker(marker)
        await self._question(lease, lambda client: client.set(lease, "", expiry=expiry))


def marker_of(held: bytes) -> Marker | None:
    """The marker that a server holds under a marker's name; None if that is none."""
    match = _MARKER.fullmatch(held)
    if match is None or int(match[2]) >= EPOCH_CEILING:
        return None
    return Marker(bytes.fromhex(match[1].decode("ascii")), int(match[2]))

"""The nodes of a cluster with their names, and which nodes are left alone because they do not answer.

One server is a cluster of one node here, which is never left alone: a tier has a breaker of its own.
"""

from __future__ import annotations

from binascii import crc_hqx
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from kvtier_remote.answers import bytes_of, items_of, number
from kvtier_remote.valkey.glide import Glide, library

SLOTS = 16384
PAUSE_SECONDS = 5.0
"""Seconds that a node is left alone before it is tried again."""
_FAILED_CALLS = 2
"""Number of calls in a row: the first may have been under way when a connection broke."""
_ONLY = ""
_NODES_MAX = 1000
"""Primaries that a cluster has at most, by its authors' recommendation."""
_ID_BYTES_MAX = 64


class SlotRange(NamedTuple):
    """Slots that follow each other, and the node that has them."""

    slots: range
    node: str


def stated_ranges(answer: object) -> Iterator[SlotRange]:
    """The ranges that CLUSTER SLOTS states. Raises OSError for anything that it cannot say."""
    for each in items_of(answer, 0, SLOTS):
        first, last, primary, *_ = items_of(each, 3, SLOTS)
        slots = range(number(first, number(last, SLOTS - 1)), last + 1)
        node = bytes_of(items_of(primary, 3, SLOTS)[2], _ID_BYTES_MAX).decode("ascii", "replace")
        yield SlotRange(slots, node)


def slot_of(name: str) -> int:
    """The slot of a name: that of what is in its first braces, if there is something."""
    begin = name.find("{") + 1
    end = name.find("}", begin) if begin else 0
    return crc_hqx((name[begin:end] if end > begin else name).encode(), 0) % SLOTS


class ClusterNodes:
    """Nodes are named by their ids. Used by one thread, but for `node_of` and `is_down`."""

    def __init__(self) -> None:
        self._of_slot = [_ONLY] * SLOTS
        self.slots: Mapping[str, int] = {_ONLY: 0}
        """A slot of each node."""
        self._numbers = {_ONLY: 0}
        self._failed: dict[str, int] = {}
        self._down: dict[str, float] = {}

    def learn(self, answer: object) -> None:
        """Takes in the answer to CLUSTER SLOTS. Slots without a node keep the one they had; of ranges that overlap the
        last counts. Raises OSError for anything that it cannot say, and for more nodes than a cluster has."""
        of_slot, named = list(self._of_slot), set[str]()
        for numbers, node in stated_ranges(answer):
            of_slot[numbers.start : numbers.stop] = [node] * len(numbers)
            named.add(node)
        slots = dict[str, int]()
        for slot, node in enumerate(of_slot):
            if node in named:
                slots.setdefault(node, slot)
        number(len(slots), _NODES_MAX)
        if slots:
            self._of_slot, self.slots = of_slot, slots
            self._numbers = {node: number for number, node in enumerate(slots)}
            self._down = {node: due for node, due in self._down.items() if node in slots}

    def node_of(self, name: str) -> str:
        """The node that has a name, as far as is known."""
        return self._of_slot[slot_of(name) if len(self.slots) > 1 else 0]

    def by_node(self, names: Sequence[str]) -> dict[str, Sequence[str]]:
        """Names by the nodes that have them."""
        if len(self.slots) == 1:
            return {self._of_slot[0]: names}
        found: dict[str, list[str]] = {}
        for name in names:
            found.setdefault(self.node_of(name), []).append(name)
        return {**found}

    def number_of(self, node: str) -> int:
        """The place of a node in the order of their slots, so that work can be shared out."""
        return self._numbers.get(node, 0)

    def is_down(self, node: str) -> bool:
        """True for a node that is left alone; none is once all of them do not answer."""
        return node in self._down and len(self._down) < len(self.slots)

    def judge(self, node: str, answered: bool, now: float) -> bool:
        """Learn from a call to a node. True if it is left alone from now on."""
        if answered:
            self._failed.pop(node, None)
            self._down.pop(node, None)
            return False
        self._failed[node] = self._failed.get(node, 0) + 1
        if self._failed[node] < _FAILED_CALLS or node not in self.slots or node in self._down:
            return False
        self._down[node] = now + PAUSE_SECONDS
        return self.is_down(node)

    def due(self, now: float) -> str | None:
        """A node that has been left alone long enough to be tried; it is not named again for as long."""
        for node, due in self._down.items():
            if due <= now:
                self._down[node] = now + PAUSE_SECONDS
                return node
        return None


def read_slots(client: Glide, slot: int | None = None) -> object:
    """The answer to CLUSTER SLOTS of the node that has a slot, or by any; nothing from a single server. Raises
    GlideError."""
    if not isinstance(client, library().GlideClusterClient):
        return []
    route = {} if slot is None else {"route": of_slot(slot)}
    answer: object = client.custom_command(["CLUSTER", "SLOTS"], **route)
    return answer


def of_slot(slot: int) -> Any:
    """The route to the node that has a slot."""
    glide = library()
    return glide.SlotIdRoute(glide.SlotType.PRIMARY, slot)

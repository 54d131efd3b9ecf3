"""Requests of a replay, and the keys of their blocks.

A request lists one id for each block of its context, in prefix order. Ids mean something only in place: a block's
key is the hash of all ids up to it, chained, so two requests share a block exactly as far as their ids agree. The
chain starts at a root made of names only; keys are the same in every process and on every run.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import xxhash

from kvtier.types.arrays import IntArray
from kvtier.types.keys import OffloadKey, make_key
from kvtier.types.requests import RequestInfo

REMEMBERED_SESSIONS = 16


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """A request: block ids in prefix order, of which the first `prompt_blocks` belong to the prompt.

    Ids mean the same only below the same `root`: requests of two roots never share a block. `session` only names the
    conversation, so that a growing one need not be hashed again from its first block. `arrived` is when the request
    came, in seconds, None where that is not known; times may go back.
    """

    root: str
    session: str
    ids: IntArray
    prompt_blocks: int
    prompt_tokens: int
    output_tokens: int
    arrived: float | None = None

    @property
    def info(self) -> RequestInfo | None:
        """The facts for policies that follow requests."""
        return RequestInfo(session=f"{self.root} {self.session}") if self.session else None


@dataclass(frozen=True, slots=True)
class RequestSource:
    """A finite sequence of requests: `requests` yields the same ones in the same order at every call.

    What must be known before it runs: how many requests there are, the most blocks that one of them has, the tokens of
    a block, and the seconds between the first and the last request, None where no times are known. `name` is for
    reports.
    """

    name: str
    num_requests: int
    longest_blocks: int
    block_tokens: int
    requests: Callable[[], Iterator[Request]]
    seconds: float | None = None


class KeyChain:
    """Hashes requests to keys. A session that grows is hashed from where it last agreed."""

    def __init__(self) -> None:
        self._remembered: OrderedDict[tuple[str, str], tuple[IntArray, list[bytes]]] = OrderedDict()

    def digests(self, request: Request) -> list[bytes]:
        """A 16-byte xxh3-128 digest for each block of the request, over all ids from the root to it."""
        name = (request.root, request.session)
        digests: list[bytes] = []
        if name in self._remembered:
            ids, known = self._remembered.pop(name)
            digests = known[: common_prefix(ids, request.ids)]
        parent = digests[-1] if digests else xxhash.xxh3_128_digest(request.root.encode(errors="surrogateescape"))
        raw = request.ids[len(digests) :].astype(">i8").tobytes()
        for start in range(0, len(raw), 8):
            parent = xxhash.xxh3_128_digest(parent + raw[start : start + 8])
            digests.append(parent)
        self._remembered[name] = (request.ids, digests)
        if len(self._remembered) > REMEMBERED_SESSIONS:
            self._remembered.popitem(last=False)
        return list(digests)


def group_keys(digests: Sequence[bytes], group: int) -> tuple[OffloadKey, ...]:
    """The keys of one group for a request's digests, one for each GPU block."""
    return tuple(make_key(digest, group) for digest in digests)


def offload_keys(keys: Sequence[OffloadKey], factor: int) -> tuple[OffloadKey, ...]:
    """The keys of the offloaded blocks: every `factor`-th GPU block's, as its prefix ends where theirs does."""
    return tuple(keys[factor - 1 :: factor])


def common_prefix(left: IntArray, right: IntArray) -> int:
    """The number of first ids that agree."""
    size = min(len(left), len(right))
    differs = left[:size] != right[:size]
    return int(differs.argmax()) if differs.any() else size

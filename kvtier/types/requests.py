"""Facts of the requests that a stack's calls serve."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvtier.types.keys import GroupIndex, OffloadKey, RequestId


@dataclass(frozen=True, slots=True)
class RequestInfo:
    """Describes the request behind lookups, loads and stores. Every field is optional.

    `session` groups the requests of one conversation, `tenant` those of one customer. `priority` orders requests, the
    higher the more urgent. `retain_until` is a time on the stack's clock (that of `time.monotonic`) until which the
    request's blocks are likely to be used again.

    Policies that follow requests are given it (`RequestUse.info`); the others decide without it.
    """

    session: str = ""
    tenant: str = ""
    priority: int = 0
    retain_until: float | None = None


NO_INFO = RequestInfo()


class RequestUse(NamedTuple):
    """A request that begins, with the blocks it uses of one KV cache group: for policies that follow requests.

    `keys` are in prefix order from position 0: `keys[i - 1]` is the parent of `keys[i]`, and no key comes twice. They
    are the blocks of the prompt, and those of the output where the caller knows them. `new_blocks` of them no tier
    holds. `time` is in seconds and never goes back. A request of several groups is one use for each of them.
    """

    request_id: RequestId
    time: float
    keys: Sequence[OffloadKey]
    group: GroupIndex
    new_blocks: int
    info: RequestInfo = NO_INFO

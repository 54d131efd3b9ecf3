"""Requests of an application about blocks: to keep them for a while, to bring them up or down, to let them go.

They state what no policy can find out: that an agent waits for a tool and will go on, or that a branch is over. Each
of these requests is best effort. It never makes a load or a store fail, and what is refused has a reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias

from kvtier.types.keys import OffloadKey


class HintRefusal(StrEnum):
    """Why blocks of a hint were left as they are.

    NOT_FOUND: no tier that the stack evicts from has the block. OVER_QUOTA: the tier may not retain so many bytes more.
    TOO_MANY: as many sets, or blocks of sets, are retained as may be. QUEUE_FULL: as many blocks wait to be brought up
    as may wait. IN_USE: the block is pinned, or being copied. NO_TIER: no lower tier takes the block. STOPPED: the
    stack is closing, or has failed.
    """

    NOT_FOUND = "not_found"
    OVER_QUOTA = "over_quota"
    TOO_MANY = "too_many"
    QUEUE_FULL = "queue_full"
    IN_USE = "in_use"
    NO_TIER = "no_tier"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class Retain:
    """Do not evict these blocks, given in prefix order, from every tier for so many seconds.

    The stack keeps each in one tier that it evicts from itself: in a lower tier that has it, else in the CPU tier until
    a lower tier has it. They join the set of `session`, which is kept until the latest of its calls lapses.
    """

    keys: Sequence[OffloadKey]
    seconds: float
    session: str = ""


@dataclass(frozen=True, slots=True)
class Pin:
    """`Retain` in the CPU tier: blocks that are in lower tiers alone are brought up."""

    keys: Sequence[OffloadKey]
    seconds: float
    session: str = ""


@dataclass(frozen=True, slots=True)
class Prefetch:
    """Bring these blocks up to the CPU tier, because they will be loaded soon; without keys, what `session` retains.

    Loads, and what they wait for, go before it.
    """

    keys: Sequence[OffloadKey] = ()
    session: str = ""


@dataclass(frozen=True, slots=True)
class Demote:
    """Write these blocks back to the lower tiers now, and give up their CPU rows; without keys, what `session` retains.

    A block keeps its row unless a lower tier has it in the end.
    """

    keys: Sequence[OffloadKey] = ()
    session: str = ""


@dataclass(frozen=True, slots=True)
class Release:
    """Ends what `session` retains and pins: its blocks are ordinary from now on."""

    session: str = ""


KVHint: TypeAlias = Retain | Pin | Prefetch | Demote | Release


@dataclass(frozen=True, slots=True)
class HintResult:
    """The number of blocks that a hint is followed for, and of those left as they are, by reason.

    Blocks to be brought up or down are on their way; what becomes of them later is counted in the stack's figures.
    """

    accepted: int = 0
    refused: Mapping[HintRefusal, int] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """True if no block was refused."""
        return not self.refused

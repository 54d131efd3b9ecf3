"""Items of an engine that has no requests of its own for what it does: presence, places, figures, its orderly end.

Each with a number has one answer with that number.
"""

from __future__ import annotations

from kvtier.service.packing import Item, Keys


class Look(Item, tag=20, frozen=True):
    """Look keys up for no request; `number` comes back in `Found`. Nothing is leased. With `asks` tiers are asked.

    `more` is that of an `Ask`.
    """

    number: int
    keys: Keys
    asks: bool = True
    more: bool = False


class Locate(Item, tag=21, frozen=True):
    """Name the highest tier that holds each key."""

    number: int
    keys: Keys


class Touch(Item, tag=22, frozen=True):
    """A request used these keys, given in prefix order."""

    request: str
    keys: Keys


class AskFigures(Item, tag=23, frozen=True):
    """Send all figures as they are."""

    number: int


class AskEvents(Item, tag=24, frozen=True):
    """Send `Events` from here on: first what the tiers have. For an engine whose greeting did not ask for them."""


class Leave(Item, tag=25, frozen=True):
    """The engine is about to close its connections, and no copy of it is in flight.

    A private process that serves no other one writes back and closes its tiers first, and ends. `distrust`: the reason
    why what this engine stored may have the name of other weights. Then it is reset before, and lower tiers are held
    back; also where a worker has left and ended the session.
    """

    number: int
    distrust: str = ""


class Located(Item, tag=44, frozen=True):
    """The names of tiers, and for each key of a `Locate` a byte: 0, or the place of its tier among them from 1 on."""

    number: int
    tiers: list[str]
    places: bytes


class Hinted(Item, tag=45, frozen=True):
    """The blocks that a hint is followed for, and those left as they are by reason."""

    number: int
    accepted: int
    refused: dict[str, int]


class FiguresPart(Item, tag=46, frozen=True):
    """A part of the figures of the stack, as JSON; `last`: no part follows."""

    number: int
    part: bytes
    last: bool


class Left(Item, tag=47, frozen=True):
    """The engine may go. `ends`: so does this process, with so many blocks dropped and jobs that did not end."""

    number: int
    ends: bool = False
    dropped: int = 0
    unfinished: int = 0

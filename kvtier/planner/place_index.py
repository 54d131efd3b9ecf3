"""Index of things that take up several places, and share some of them."""

from collections.abc import Collection, Hashable, Iterable, Iterator
from typing import Generic, TypeVar

from kvtier.errors import IntegrityError

P = TypeVar("P", bound=Hashable)
T = TypeVar("T", bound=Hashable)


class PlaceIndex(Generic[P, T]):
    """The things at each place, in the order they were added. A place counts while there is at least one thing.

    As a fence, the places are the ids of GPU blocks that must not be reused, and the things are the stores that need
    them. Two GPU blocks with one hash are two places, and the end of one store leaves the fence of the other.
    """

    __slots__ = ("_things",)

    def __init__(self) -> None:
        self._things: dict[P, dict[T, None]] = {}

    def add(self, places: Iterable[P], thing: T) -> None:
        """Add a thing at each of its places. IntegrityError if it is at one of them already."""
        for place in places:
            things = self._things.setdefault(place, {})
            if thing in things:
                raise IntegrityError(f"the same thing was added twice at {place}")
            things[thing] = None

    def remove(self, places: Iterable[P], thing: T) -> None:
        """Remove a thing from each of its places. IntegrityError if it is not at one of them."""
        for place in places:
            things = self._things.get(place, {})
            if thing not in things:
                raise IntegrityError(f"what was removed is not at {place}")
            del things[thing]
            if not things:
                del self._things[place]

    def at(self, place: P) -> Collection[T]:
        """The things at a place, in the order they were added; empty if there are none."""
        return self._things.get(place, ())

    def pop(self, place: P) -> Collection[T]:
        """Remove and return the things at one place; they stay at their others."""
        return self._things.pop(place, ())

    def __iter__(self) -> Iterator[P]:
        return iter(self._things)

    def __contains__(self, place: P) -> bool:
        return place in self._things

    def __len__(self) -> int:
        """Places with at least one thing, each counted once."""
        return len(self._things)

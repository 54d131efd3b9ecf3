"""Steps of which each is to be taken whatever the others raise, as when something is closed."""

from collections.abc import Awaitable, Callable

TRIES = 2
"""A step that an exception interrupted, of a signal handler or MemoryError, is taken once more."""


def take_each(*steps: Callable[[], object]) -> None:
    """Take every step, in order, each of which may be taken again; then raise the first exception."""
    first: BaseException | None = None
    left, tries = list(steps), 0
    while left:
        try:
            tries += 1
            left[0]()
        except BaseException as error:
            first = first or error
            if tries < TRIES:
                continue
        del left[0]
        tries = 0
    if first is not None:
        raise first


async def take_in_turn(steps: list[Callable[[], Awaitable[None]]]) -> None:
    """Take the steps in order. Each leaves the list once it was taken, so that another call goes on where this raised.

    A step that an exception interrupted is taken again, so each may be taken more than once.
    """
    tries = 0
    while steps:
        try:
            await steps[0]()
            del steps[0]
        except Exception:
            tries += 1
            if tries >= TRIES:
                raise

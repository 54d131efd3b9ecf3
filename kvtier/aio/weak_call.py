"""A callback that does not keep its object alive."""

import weakref
from collections.abc import Callable


def weak_call(method: Callable[[], object]) -> Callable[[], None]:
    """A function that calls a bound method, or does nothing once the method's object is gone."""
    reference = weakref.WeakMethod(method)

    def call() -> None:
        alive = reference()
        if alive is not None:
            alive()

    return call

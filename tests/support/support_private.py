"""A private stack process for a stack file, by its socket."""

from __future__ import annotations

from kvtier.client.private import LINGER_SECONDS, PrivateStack, Restarts


def private_socket(
    stack: str, folder: str = "", restarts: Restarts | None = None, linger_seconds: float = LINGER_SECONDS
) -> str:
    """The socket of the process, which is started unless it is there; again, as often as `restarts` allows."""
    private = PrivateStack(stack, folder, linger_seconds)
    private.restarts = restarts or private.restarts
    private.start(again=restarts is not None)
    return private.path

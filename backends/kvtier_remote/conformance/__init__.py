"""The conformance suite of transports: subclass `TransportTests`, supply `make`, and pytest holds a remote engine to
the protocol in `kvtier_remote.transport`.

It needs pytest and no plugin. `kvtier.testing.conformance.LoadStoreTests` holds the tier above it to the contract of
tiers.
"""

from kvtier_remote.conformance.base import TransportBase
from kvtier_remote.conformance.lifecycle import ConnectionTests, FrozenServerTests
from kvtier_remote.conformance.values import MarkerTests, SpreadServersTests, ValueTests


class TransportTests(ConnectionTests, ValueTests, MarkerTests, FrozenServerTests, SpreadServersTests):
    """Everything that `kvtier_remote.transport.Transport` says.

    Every test runs in an event loop of its own and fails if a file descriptor, a thread or a task is left behind or
    anything ran on the loop's default executor.
    """


__all__ = ["TransportBase", "TransportTests"]

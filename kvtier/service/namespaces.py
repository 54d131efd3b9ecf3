"""The namespaces in one pool, as greetings bring them: two at a time of one layout, kept apart by their keys."""

from __future__ import annotations

import json
from collections.abc import Sequence

import msgspec

from kvtier.errors import ConfigError, KVTierError
from kvtier.service.wire import WireError
from kvtier.types.geometry import KVLayout
from kvtier.types.keys import OffloadKey
from kvtier.types.namespace import DIGEST_BYTES, FORMAT_VERSION, Namespace

NAMESPACES_MAX = 2
WORKERS_MAX = FACTOR_MAX = 4096
"""Workers of an engine, and GPU blocks of an offloaded block: a stack has something for each of them."""
PAGES_MAX = 1 << 16
"""GPU blocks of a group in a row, those of all workers that store."""


def read_namespace(manifest: bytes) -> Namespace:
    """The namespace whose `manifest` this is. Raises WireError for anything else, with every byte compared, and for a
    layout beyond the bounds of a stack process."""
    try:
        fields = json.loads(manifest)
        if not isinstance(fields, dict) or fields.pop("format_version", None) != FORMAT_VERSION:
            raise WireError("a namespace of another format")
        namespace = msgspec.convert(fields, Namespace)
    except (ValueError, RecursionError, KVTierError, msgspec.ValidationError) as error:
        raise WireError(f"what a peer sent is no namespace: {error}") from error
    if namespace.manifest().encode() != manifest:
        raise WireError("what a peer sent is no namespace in its canonical form")
    _check_bounds(namespace.layout)
    return namespace


def _check_bounds(layout: KVLayout) -> None:
    workers, factor = layout.world_size, layout.block_size_factor
    if workers > WORKERS_MAX or factor > FACTOR_MAX or layout.num_copies * factor > PAGES_MAX:
        raise WireError(
            f"a layout of {workers} workers and a block_size_factor of {factor}; at most {WORKERS_MAX} and "
            f"{FACTOR_MAX} are served, and {PAGES_MAX} GPU blocks of a group in a row"
        )


class KeySpace:
    """The keys of one namespace in the pool. `prefix` is before each of them; the first namespace has none.

    `name` is for people.
    """

    def __init__(self, prefix: bytes, others: set[bytes], name: str = "") -> None:
        self.prefix = prefix
        self.name = name
        self._others = others
        self.sessions = 0

    def to_pool(self, keys: list[OffloadKey]) -> list[OffloadKey]:
        """An engine's keys, as the pool has them."""
        prefix = self.prefix
        return [OffloadKey(prefix + key) for key in keys] if prefix else keys

    def of_engine(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """The keys among these of the pool that are of this namespace, as its engines have them."""
        prefix = self.prefix
        if prefix:
            return [OffloadKey(key[DIGEST_BYTES:]) for key in keys if key.startswith(prefix)]
        return [key for key in keys if key[:DIGEST_BYTES] not in self._others] if self._others else list(keys)


class Namespaces:
    """The namespaces that sessions of a pool use. The first one names the lower tiers, for the life of the pool.

    `first` is its digest; `prefixes` are those of keys of all others that the rows may hold.
    """

    def __init__(self) -> None:
        self.first = b""
        self._spaces: dict[bytes, KeySpace] = {}
        self.prefixes: set[bytes] = set()

    def join(self, namespace: Namespace) -> KeySpace:
        """The keys of a namespace, for one more session. Raises ConfigError if there is no place for it."""
        digest = namespace.digest()
        space = self._spaces.get(digest)
        if space is None:
            if len(self._spaces) >= NAMESPACES_MAX:
                raise ConfigError(f"its namespace {_name(namespace)} would be the third here: two are served at a time")
            self.first = self.first or digest
            prefix = b"" if digest == self.first else digest
            if prefix:
                self.prefixes.add(prefix)
            space = self._spaces[digest] = KeySpace(prefix, self.prefixes, _name(namespace))
        space.sessions += 1
        return space

    def leave(self, space: KeySpace) -> None:
        """A session has ended. Without one a namespace has no place any more; its blocks stay."""
        space.sessions -= 1
        if not space.sessions:
            self._spaces = {digest: each for digest, each in self._spaces.items() if each is not space}


def with_first(
    first: bytes, spaces: Sequence[bytes], keys: Sequence[OffloadKey]
) -> tuple[list[bytes], list[OffloadKey]]:
    """(digests of namespaces, keys) with `first` as the namespace without a prefix, which `spaces[0]` was."""
    if spaces[0] == first:
        return list(spaces), list(keys)
    renamed = []
    for key in keys:
        digest = key[:DIGEST_BYTES]
        stripped = key[DIGEST_BYTES:] if digest == first else key if digest in spaces[1:] else spaces[0] + key
        renamed.append(OffloadKey(stripped))
    return [first, *[each for each in spaces if each != first]], renamed


def _name(namespace: Namespace) -> str:
    """A namespace for people: what it is of, and its digest."""
    parts = [part for part in (namespace.model, namespace.weights, namespace.tag) if part]
    return f"{' '.join(parts)[:200]} ({namespace.digest().hex()})"

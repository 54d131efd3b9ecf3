"""Names of blocks and markers. Nothing of a model, a tag or a key can be read from them.

Blocks are `<prefix>:b:<namespace>.<incarnation><epoch>.<key>`, markers `<prefix>:m:<namespace>` and manifests
`<prefix>:manifests:<namespace>.json`, with the separator `:`. With `/` and two digits of fan-out, blocks are
`<prefix>/b/<first two of the key>/<the same>`. Leases are `<prefix>:l:<namespace>.<incarnation><epoch>`. All digits
are lower-case hexadecimal: 16 of the namespace's digest, 16 of the incarnation, at least 8 of the epoch, and the first
40 of the SHA-256 of the key with its group. Names of blocks end with the version of another envelope than 1, as `.v2`:
releases with different ones share a prefix and its markers.
"""

import re
from collections.abc import Callable
from hashlib import sha256
from typing import NamedTuple

from kvtier.tier.block_envelope import VERSION_SUFFIX, version_suffix
from kvtier.types.keys import OffloadKey
from kvtier_remote.transport import Marker, NameFormat

_NAMESPACE_BYTES = 8
_KEY_BYTES = 20
_NAMESPACE = re.compile(r"[0-9a-f]{16}")
_BLOCK = re.compile(r"([0-9a-f]{16})\.([0-9a-f]{16})([0-9a-f]{8,16})\.([0-9a-f]{40})" + f"({VERSION_SUFFIX})$")
_LEASE = re.compile(r"([0-9a-f]{16})\.([0-9a-f]{16})([0-9a-f]{8,16})")


class BlockName(NamedTuple):
    """The parts of a block's name: the front of its namespace's digest, its marker, the digest of its key.

    `is_other_version`: of another envelope than this release's, which neither loads nor removes it.
    """

    namespace: bytes
    marker: Marker
    key: bytes
    is_other_version: bool = False


def key_digest(key: bytes) -> bytes:
    """The digest of a key in the name of its block."""
    return sha256(key).digest()[:_KEY_BYTES]


def namespace_of(digits: str) -> bytes | None:
    """The front of a namespace's digest as it is spelled in names; None for anything else."""
    return bytes.fromhex(digits) if _NAMESPACE.fullmatch(digits) else None


class StoreNames:
    """The names below one prefix: what those of blocks and of markers begin with, and what the others are."""

    def __init__(self, name_format: NameFormat, prefix: str) -> None:
        self._name_format = name_format
        self.blocks, self.markers, self.leases, self._manifests = (
            name_format.separator.join((prefix, kind, "")) for kind in ("b", "m", "l", "manifests")
        )

    def marker(self, namespace: bytes) -> str:
        """The marker of a namespace, given its digest or the front of it."""
        return self.markers + namespace[:_NAMESPACE_BYTES].hex()

    def manifest(self, namespace: bytes) -> str:
        """The name of a namespace's manifest, for people."""
        return f"{self._manifests}{namespace[:_NAMESPACE_BYTES].hex()}.json"

    def parse_lease(self, name: str) -> tuple[bytes, Marker] | None:
        """The namespace and the marker in the name of a lease; None for any other name."""
        match = _LEASE.fullmatch(name.removeprefix(self.leases))
        if match is None:
            return None
        return bytes.fromhex(match[1]), Marker(bytes.fromhex(match[2]), int(match[3], 16))

    def block(self, name: str) -> BlockName | None:
        """The parts of a block's name; None for any other name."""
        match = _BLOCK.search(name)
        if match is None:
            return None
        separator, fan_out = self._name_format
        folder = match[4][:fan_out] + separator if fan_out else ""
        if name != self.blocks + folder + match[0]:
            return None
        namespace, incarnation, key = (bytes.fromhex(match[i]) for i in (1, 2, 4))
        return BlockName(namespace, Marker(incarnation, int(match[3], 16)), key, match[5] != version_suffix())


class BlockNames:
    """The names of one namespace."""

    def __init__(self, name_format: NameFormat, prefix: str, namespace: bytes) -> None:
        names = StoreNames(name_format, prefix)
        self.marker, self.manifest = names.marker(namespace), names.manifest(namespace)
        self._name_format = name_format
        self._head = names.blocks
        self._namespace = f"{namespace[:_NAMESPACE_BYTES].hex()}."
        self._leases = names.leases

    def lease(self, marker: Marker) -> str:
        """The lease of those who use a marker."""
        return f"{self._leases}{self._namespace}{marker.incarnation.hex()}{marker.epoch:08x}"

    def namer(self, marker: Marker) -> Callable[[OffloadKey], str]:
        """A function that spells the names of blocks under a marker."""
        separator, fan_out = self._name_format
        suffix, head = version_suffix(), self._head
        middle = f"{self._namespace}{marker.incarnation.hex()}{marker.epoch:08x}."

        def name(key: OffloadKey) -> str:
            digest = key_digest(key).hex()
            folder = digest[:fan_out] + separator if fan_out else ""
            return f"{head}{folder}{middle}{digest}{suffix}"

        return name

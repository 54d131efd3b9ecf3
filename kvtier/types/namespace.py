"""The namespace: everything that must match for stored bytes to mean the same."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from kvtier.types.dtypes import canonical_dtype
from kvtier.types.geometry import KVLayout

FORMAT_VERSION = 1
DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class Namespace:
    """All that decides the meaning of an engine's KV bytes.

    Two namespaces that differ in any field never share a block: a changed field is a clean miss. `dtype` may be spelled
    in any way that `kvtier.types.dtypes` knows.
    `extra` takes whatever else an integration knows (KV layout name, attention backend, ...), as strings.
    """

    layout: KVLayout
    model: str = ""
    weights: str = ""
    dtype: str = ""
    hash_algorithm: str = ""
    hash_seed: str = ""
    tag: str = ""
    extra: Mapping[str, str] = field(default_factory=dict)

    def manifest(self) -> str:
        """Canonical JSON of every field, as it is kept beside the data for people to read."""
        fields: dict[str, object] = {"format_version": FORMAT_VERSION}
        fields.update(asdict(self))
        fields["dtype"] = canonical_dtype(self.dtype)
        fields["extra"] = dict(self.extra)
        return json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=True)

    def digest(self) -> bytes:
        """The first 16 bytes of SHA-256 over the manifest."""
        return hashlib.sha256(self.manifest().encode()).digest()[:DIGEST_BYTES]

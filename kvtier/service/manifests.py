"""The namespace of an engine, as its greeting brings it."""

from __future__ import annotations

import json

import msgspec

from kvtier.errors import KVTierError
from kvtier.service.wire import WireError
from kvtier.types.namespace import FORMAT_VERSION, Namespace


def read_namespace(manifest: bytes) -> Namespace:
    """The namespace whose `manifest` this is. Raises WireError for anything else, with every byte compared."""
    try:
        fields = json.loads(manifest)
        if not isinstance(fields, dict) or fields.pop("format_version", None) != FORMAT_VERSION:
            raise WireError("a namespace of another format")
        namespace = msgspec.convert(fields, Namespace)
    except (ValueError, RecursionError, KVTierError, msgspec.ValidationError) as error:
        raise WireError(f"what a peer sent is no namespace: {error}") from error
    if namespace.manifest().encode() != manifest:
        raise WireError("what a peer sent is no namespace in its canonical form")
    return namespace

"""The keys of `adapter_params` of LMCache's L2 adapter of type `plugin`. All are kvtier's, and strict."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field, field_validator

from kvtier.engines.engine_memory.options import read_options
from kvtier.engines.model_identity import IdentifiedOptions
from kvtier.errors import ConfigError
from kvtier.options import ByteSize, Seconds

AT = "adapter_params"
PIECE_SIZES = 4
"""Pieces of an object have so many sizes, each half of the one before."""
PAGE_BYTES = 4096


class L2Options(IdentifiedOptions):
    """The keys beside those of the tier."""

    piece_bytes: ByteSize = Field(
        default=1 << 20,
        ge=64 << 10,
        le=64 << 20,
        description="an object is kept in pieces of this size, and its end in pieces of a half, a quarter and an "
        "eighth of it; a multiple of 32 KiB",
    )
    job_timeout_seconds: Seconds = Field(
        default=10.0, description="after this what has not been loaded is a miss, and what has not been stored is not"
    )
    lookup_timeout_seconds: Seconds = Field(
        default=1.0, description="how long a lookup waits for a tier that hosts share"
    )

    @field_validator("piece_bytes")
    @classmethod
    def _check_pieces(cls, value: int) -> int:
        smallest = PAGE_BYTES << (PIECE_SIZES - 1)
        if value % smallest:
            raise ValueError(f"must be a multiple of {smallest >> 10} KiB")
        return value


def l2_options(adapter_params: Mapping[str, Any]) -> L2Options:
    """kvtier's options. `type` is that of the tier, `fs` when absent.

    Raises ConfigError with one line for each thing that is wrong.
    """
    keys = dict(adapter_params)
    backend = keys.pop("type", "fs")
    if not isinstance(backend, str):
        raise ConfigError("is the name of a type of tier, such as fs", f"{AT}.type")
    options = read_options(L2Options, backend, keys, AT)
    options.require_identity("LMCache", AT)
    return options

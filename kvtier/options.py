"""Options of tiers: strict pydantic models and the units people write in stack files."""

from __future__ import annotations

import re
from typing import Annotated, ClassVar, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

_UNITS = {"": 1, "B": 1}
for _power, _prefix in enumerate("KMGTP", start=1):
    _UNITS[f"{_prefix}iB"] = 1024**_power
    _UNITS[f"{_prefix}B"] = 1000**_power
_SIZE = re.compile(r"([0-9]{1,18})(?:\.([0-9]{1,6}))? ?([A-Za-z]*)")


def parse_size(text: object) -> int:
    """Bytes from an integer or text such as `64GiB`, `1.5 TB`, `4096`. ValueError names what is accepted."""
    if isinstance(text, int) and not isinstance(text, bool):
        return text
    match = _SIZE.fullmatch(text) if isinstance(text, str) else None
    unit = _UNITS.get(match[3]) if match else None
    if match is None or unit is None:
        raise ValueError(f"{text!r} is not a size; write a whole number of bytes or a number with KiB, MiB, GiB, TiB")
    fraction = match[2] or ""
    return int(match[1]) * unit + (int(fraction) * unit // 10 ** len(fraction) if fraction else 0)


ByteSize = Annotated[
    int,
    BeforeValidator(parse_size),
    Field(gt=0, lt=1 << 63),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "integer", "exclusiveMinimum": 0},
                {"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)? ?([KMGTP]i?)?B?$"},
            ]
        }
    ),
]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False, strict=False)]
INDEX_BYTES_PER_SLOT = 220
"""Upper bound of the directory's memory for one slot of an owned tier, keys with hashes of up to 36 bytes included."""

PolicyName = Literal["lru", "arc"]
WritePolicy = Literal["write_through", "on_evict"]


class Options(BaseModel):
    """Base of every options model: strict types, unknown keys refused, immutable."""

    model_config: ClassVar[ConfigDict] = ConfigDict(strict=True, extra="forbid", frozen=True)


class TierOptions(Options):
    """What every tier can be told. `type` is the entry point's name in the group `kvtier.backends`."""

    type: str
    name: str = Field(
        default="",
        max_length=64,
        pattern=r"^[A-Za-z0-9_.-]*$",
        description="shown in tables and metrics; the type when empty",
    )

    def share(self, index: int, count: int) -> Self:
        """The options of engine `index` of `count` that are started from one stack file on one host.

        Together they stay within the bounds of the file, and no two use the same place. Here: nothing to share.
        """
        if not 0 <= index < count:
            raise ValueError(f"there is no engine {index} among {count}")
        return self


MAX_LOWER_TIERS = 8
"""Tiers below the CPU tier, at most: what a row is owed to is kept as bits of a byte."""


class LowerTierOptions(TierOptions):
    """What every tier below the CPU can be told."""

    policy: PolicyName = Field(default="lru", description="which block goes first when the tier is full")
    write_policy: WritePolicy = Field(
        default="write_through",
        description="write_through: stored once the CPU tier has it; on_evict: stored before the CPU tier lets it go",
    )
    inflight_bytes: ByteSize = Field(default=64 << 20, description="bytes of transfers under way at once, at most")
    job_timeout_seconds: Seconds = Field(
        default=30.0, description="after this a load counts as a miss, a store as dropped"
    )
    index_bytes_max: ByteSize | None = Field(
        default=None, description="bound of the directory's memory; fewer slots are used if need be"
    )

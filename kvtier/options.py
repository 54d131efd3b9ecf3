"""Options of tiers: strict pydantic models and the units people write in stack files."""

import re
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, Protocol, Self, TypeVar, runtime_checkable

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator

from kvtier.errors import ConfigError

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


_DURATION = re.compile(r"([0-9]{1,9}) ?([smhd])")
_UNIT_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def parse_duration(text: object) -> int:
    """Whole seconds from text such as `90s`, `2h`, `7d`. ValueError names what is accepted."""
    match = _DURATION.fullmatch(text) if isinstance(text, str) else None
    if match is None or int(match[1]) == 0:
        raise ValueError(f"{text!r} is not a time; write a number with s, m, h or d, such as 2d")
    return int(match[1]) * _UNIT_SECONDS[match[2]]


def parse_quota(text: object) -> int | float:
    """A share from text such as `25%` or a number below 1, or bytes as `parse_size` takes them."""
    if isinstance(text, str) and text.endswith("%"):
        match = re.fullmatch(r"([0-9]{1,3})(\.[0-9]{1,6})? ?%", text)
        text = float(f"{match[1]}{match[2] or ''}") / 100 if match else -1.0
    if isinstance(text, float):
        if not 0 <= text <= 1:
            raise ValueError("a share is between 0% and 100%")
        return text
    return parse_size(text)


_SHOWN_UNITS = ("KiB", "MiB", "GiB", "TiB", "PiB")


def size_text(size_bytes: int) -> str:
    """Bytes with a binary unit: `512 B`, `64 KiB`, `1.50 GiB`; rounded down, so never more than there is."""
    if size_bytes < 1024:
        return f"{size_bytes} B"
    unit = min((size_bytes.bit_length() - 1) // 10, len(_SHOWN_UNITS))
    scale = 1024**unit
    if size_bytes % scale == 0:
        return f"{size_bytes // scale} {_SHOWN_UNITS[unit - 1]}"
    hundredths = size_bytes * 100 // scale
    return f"{hundredths // 100}.{hundredths % 100:02d} {_SHOWN_UNITS[unit - 1]}"


def count_text(count: int) -> str:
    """A whole number with thousands separated: `1,048,576`."""
    return f"{count:,}"


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
Quota = Annotated[
    int | float,
    BeforeValidator(parse_quota),
    Field(ge=0, lt=1 << 63),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "number", "minimum": 0},
                {"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)? ?([KMGTP]i?)?(B|%)?$"},
            ]
        }
    ),
]
"""Bytes of a tier, or a share of its capacity."""
Seconds = Annotated[float, Field(gt=0, lt=1e9, allow_inf_nan=False)]
"""Some of them are handed to waits of the system, which take no more than 9.2e9. An `le` here would replace the
`le` of an option."""
Duration = Annotated[int, BeforeValidator(parse_duration), Field(json_schema_extra={"type": "string"})]
"""Whole seconds, written with a unit."""
MaxAge = Annotated[
    Duration | None,
    Field(description="blocks stored longer ago, such as 7d, are misses and are removed; no limit when absent"),
]
INDEX_BYTES_PER_SLOT = 220
"""Upper bound of the directory's memory for one slot of an owned tier, keys with hashes of up to 36 bytes included."""

ADMISSION_BYTES = 4 << 20
"""Memory of the first uses of a tier with `admit: second_use`, which is part of its index."""
PREDICTED_BYTES = 64 << 20
"""Memory of what a tier with `admit: predicted` knows of prompts, which is part of its index, at most."""

PolicyName = Annotated[str, Field(min_length=1, max_length=64)]
"""Of an eviction policy: one of kvtier's own, or of an entry point in the group `kvtier.policies`."""
WritePolicy = Literal["write_through", "on_evict"]
AdmissionName = Literal["always", "second_use", "predicted"]


def quota_bytes(quota: float, capacity_bytes: int) -> int:
    """The bytes of a quota in a tier of this capacity."""
    return quota if isinstance(quota, int) else int(quota * capacity_bytes)


def quota_share(quota: float, count: int) -> int | float:
    """The quota of one of `count` engines that divide the tier among them."""
    return quota // count if isinstance(quota, int) else quota


class Options(BaseModel):
    """Base of every options model: strict types, unknown keys refused, immutable."""

    model_config: ClassVar[ConfigDict] = ConfigDict(strict=True, extra="forbid", frozen=True)


class TierOptions(Options):
    """Options of every tier. `type` is the entry point's name in the group `kvtier.backends`."""

    CAPACITY_KEY: ClassVar[str] = ""
    """The name of the option that bounds the tier's bytes; empty for a tier without a bound of its own."""

    SIZED_BY_CAPACITY: ClassVar[tuple[str, ...]] = ()
    """The names of options that are chosen again for another capacity."""

    type: str
    name: str = Field(
        default="",
        max_length=64,
        pattern=r"^[A-Za-z0-9_.-]*$",
        description="shown in tables and metrics; the type when empty",
    )

    @property
    def label(self) -> str:
        """The tier's name in tables, metrics, logs and errors."""
        return self.name or self.type

    def with_capacity(self, num_bytes: int) -> Self:
        """The same tier with room for this number of bytes; sizes that follow from the capacity are chosen again."""
        if not self.CAPACITY_KEY:
            raise ConfigError(f"a tier of type {self.type} has no capacity of its own")
        chosen = {name: type(self).model_fields[name].get_default() for name in self.SIZED_BY_CAPACITY}
        return self.model_copy(update={self.CAPACITY_KEY: num_bytes, **chosen})

    @property
    def capacity_bytes(self) -> int | None:
        """The bytes that the tier may take; None for a tier without a bound of its own."""
        bound: int | None = getattr(self, self.CAPACITY_KEY) if self.CAPACITY_KEY else None
        return bound

    def with_known(self, **values: object) -> Self:
        """The same tier with those of the values that it has an option for."""
        known = {name: value for name, value in values.items() if name in type(self).model_fields}
        return self.model_copy(update=known)


@runtime_checkable
class SharesHost(Protocol):
    """Options of a tier of which each engine started from one stack file on one host gets a part of its own."""

    def share(self, index: int, count: int) -> Self:
        """The options of engine `index` of `count`: together within the bounds of the file, no two in one place."""
        ...


@runtime_checkable
class FitsEngine(Protocol):
    """Options that change below a serving engine whose processes copy the blocks themselves."""

    def for_engine(self, restart_seconds: float) -> Self:
        """The options there. An engine that restarts overlaps with itself for up to `restart_seconds`.

        Raises ConfigError for an option that does not go with such an engine.
        """
        ...


@runtime_checkable
class HasFolders(Protocol):
    """Options of a tier that keeps its blocks in folders."""

    @property
    def folders(self) -> tuple[str, ...]:
        """The folders, at least one."""
        ...

    def in_folders(self, folders: Sequence[str]) -> Self:
        """The same tier in other folders."""
        ...


@runtime_checkable
class EvictsBlocks(Protocol):
    """Options of a tier whose blocks the stack evicts: by which policy, and how much hints may retain."""

    policy: str
    retained_max: float


@runtime_checkable
class KeepsRowsFree(Protocol):
    """Options of a CPU tier: the share of its rows that background demotion keeps free."""

    free_watermark: float


@runtime_checkable
class LimitsWrites(Protocol):
    """Options of a tier that may be written a number of bytes in a day; None: any number."""

    write_bytes_per_day: int | None


OptionsT = TypeVar("OptionsT", bound=TierOptions)


def share_of(options: OptionsT, index: int, count: int) -> OptionsT:
    """The options of engine `index` of `count` that are started from one stack file on one host."""
    if not 0 <= index < count:
        raise ValueError(f"there is no engine {index} among {count}")
    if isinstance(options, SharesHost):
        shared: Any = options
        options = shared.share(index, count)
    return options


def folders_of(options: TierOptions) -> tuple[str, ...]:
    """The folders that a tier keeps its blocks in; none if it keeps them elsewhere."""
    return options.folders if isinstance(options, HasFolders) else ()


def in_folders(options: OptionsT, folders: Sequence[str]) -> OptionsT:
    """The same tier in other folders. Raises ConfigError for a tier that keeps its blocks in none."""
    if not isinstance(options, HasFolders):
        raise ConfigError(f"a tier of type {options.type} keeps its blocks in no folder")
    kept: Any = options
    placed: OptionsT = kept.in_folders(folders)
    return placed


class RecordOptions(Options):
    """Options of the trace that a stack keeps of what is asked of it."""

    folder: str = Field(
        min_length=1,
        pattern=r"^/[^\x00]*$",
        description="absolute path of the folder for the trace's files; of one process",
    )
    max_bytes: ByteSize = Field(
        default=1 << 30, ge=16 << 20, description="bytes of the folder's traces; a new file replaces the oldest one"
    )
    salt_file: str | None = Field(
        default=None,
        pattern=r"^/[^\x00]*$",
        description="absolute path of a secret that the hashes depend on, made if it is absent; "
        "without it each start has a random one, and hashes of two starts cannot be compared",
    )


class HintOptions(Options):
    """Bounds of what applications ask for with hints, beside the quota `retained_max` of each tier."""

    retained_sets: int = Field(default=1024, ge=0, le=1 << 16, description="sessions that may retain blocks at a time")
    retain_time: Duration = Field(default=3600, description="for how long a set is retained, at most")
    prefetch_blocks: int = Field(default=8192, ge=0, le=1 << 20, description="blocks that may wait to be brought up")


MAX_LOWER_TIERS = 8
"""Tiers below the CPU tier, at most: the tiers a row is dirty for are bits of a byte."""


class LowerTierOptions(TierOptions):
    """Options of every tier below the CPU."""

    write_policy: WritePolicy = Field(
        default="write_through",
        description="write_through: stored once the CPU tier has it; on_evict: stored before the CPU tier evicts it",
    )
    admit: AdmissionName = Field(
        default="always",
        description="always: every block is stored; second_use: a block that was loaded, or stored a second time; "
        "predicted: a block that is likely to be used while the tier keeps it",
    )
    inflight_bytes: ByteSize = Field(default=64 << 20, description="bytes of transfers in flight at once, at most")
    job_timeout_seconds: Seconds = Field(
        default=30.0, description="after this a load counts as a miss, a store as dropped"
    )

    @property
    def admission_bytes(self) -> int:
        """Memory that `admit` takes, whatever is stored."""
        return {"always": 0, "second_use": ADMISSION_BYTES, "predicted": PREDICTED_BYTES}[self.admit]


class SharedTierOptions(LowerTierOptions):
    """Options of every tier that places and evicts by itself, because other hosts write too."""

    hit_hint_seconds: Seconds = Field(
        default=30.0, description="that a block is there is believed for so long without another lookup"
    )
    miss_hint_seconds: Seconds = Field(
        default=5.0, description="that a block is not there is believed for so long: others store too"
    )


class OwnedTierOptions(LowerTierOptions):
    """Options of every tier below the CPU whose blocks the stack places and evicts."""

    policy: PolicyName = Field(default="lru", description="which block goes first when the tier is full")
    index_bytes_max: ByteSize | None = Field(
        default=None, description="bound of the directory's memory; fewer slots are used if need be"
    )

    retained_max: Quota = Field(
        default=0.5, description="what hints may retain here, at most: bytes, or a share of the capacity such as 50%"
    )

    @model_validator(mode="after")
    def _check_index(self) -> Self:
        if self.index_slots_max == 0:
            needed = self.admission_bytes + INDEX_BYTES_PER_SLOT
            raise ValueError(f"index_bytes_max has no room for a slot with admit: {self.admit}, which needs {needed}")
        return self

    @property
    def index_slots_max(self) -> int | None:
        """The slots that `index_bytes_max` has room for, beside the memory of `admit`; None without that bound."""
        if self.index_bytes_max is None:
            return None
        return max(0, self.index_bytes_max - self.admission_bytes) // INDEX_BYTES_PER_SLOT

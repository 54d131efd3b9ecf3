"""Options of the two filesystem tiers, as they stand in a stack file."""

import os.path
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from kvtier.errors import ConfigError
from kvtier.options import (
    ByteSize,
    LowerTierOptions,
    MaxAge,
    OwnedTierOptions,
    Seconds,
    SharedTierOptions,
    parse_size,
    quota_share,
)


def _absolute_path(path: str) -> str:
    if not os.path.isabs(path) or "\0" in path:
        raise ValueError(f"{path!r} is not an absolute path")
    if ".." in path.split("/"):
        raise ValueError(f"{path!r} contains '..'; write the path it stands for")
    return os.path.normpath(path)


FreeBytes = Annotated[int, BeforeValidator(parse_size), Field(ge=0)]
"""A size that may be zero."""
RootPath = Annotated[str, AfterValidator(_absolute_path)]
"""The absolute path of a root, normalised."""


class RootOptions(LowerTierOptions):
    """The options that both filesystem tiers have."""

    CAPACITY_KEY = "capacity"

    capacity: ByteSize = Field(description="bytes of all roots together, everything counted")
    io_engine: Literal["auto", "io_uring", "threads"] = Field(
        default="auto", description="auto: io_uring where the kernel and the package allow it, else threads"
    )
    direct: Literal["auto", "required", "off"] = Field(
        default="auto", description="auto: past the page cache where the file system really does it"
    )
    io_depth: int = Field(default=32, ge=1, le=1024, description="requests in flight at once in each root")
    io_threads: int = Field(default=8, ge=1, le=128, description="threads of each root, at most")
    min_free_bytes: FreeBytes = Field(
        default=64 << 20, description="bytes the file system keeps free for others; 0 to use it up"
    )
    create: bool = Field(default=True, description="create a missing root folder; its parent must exist")
    close_timeout_seconds: Seconds = Field(default=10.0, description="close waits this long for I/O in flight")


class FSOptions(RootOptions, OwnedTierOptions):
    """Type `fs`: one or more folders on local disks, each of one process at a time."""

    SIZED_BY_CAPACITY = ("region_bytes", "index_bytes_max")

    type: Literal["fs"] = "fs"
    roots: Annotated[list[RootPath], Field(min_length=1, max_length=64)] = Field(
        description="absolute paths of folders, one for each disk; each belongs to one process at a time"
    )
    capacity: ByteSize = Field(description="bytes of all roots together, everything counted; split equally")
    max_age: MaxAge = None
    write_bytes_per_day: ByteSize | None = Field(
        default=None, description="so much is written in any 24 hours, at most; with admit: predicted"
    )
    region_bytes: ByteSize | None = Field(
        default=None, description="bytes of a region; chosen from the capacity and the block size when absent"
    )
    allow_network_fs: bool = Field(default=False, description="use a root on NFS, SMB, FUSE and the like all the same")
    owner_timeout_seconds: float = Field(
        default=0.0,
        ge=0,
        allow_inf_nan=False,
        description="open waits this long for another process to let go of a root, as when a restart overlaps",
    )

    _sources: tuple[str, ...] = ()
    _engines: int = 1

    @property
    def folders(self) -> tuple[str, ...]:
        return tuple(self.roots)

    def in_folders(self, folders: Sequence[str]) -> Self:
        return self.model_copy(update={"roots": list(folders)})._with_sources((), 1)

    @property
    def engines(self) -> int:
        """The number of engines that divide each root among them."""
        return self._engines

    def source(self, root: str) -> str:
        """The root of the stack file that one of these roots is a share of; itself if it is not shared."""
        return self._sources[self.roots.index(root)] if self._sources else root

    def _with_sources(self, sources: Sequence[str], engines: int) -> Self:
        self._sources, self._engines = tuple(sources), engines
        return self

    def share(self, index: int, count: int) -> Self:
        """A folder beside each root and an equal part of the capacity: a root belongs to one process."""
        if count == 1:
            return self
        roots = [f"{root}-{index}" for root in self.roots]
        daily = None if self.write_bytes_per_day is None else self.write_bytes_per_day // count
        shared = {"roots": roots, "capacity": self.capacity // count, "write_bytes_per_day": daily}
        shared["retained_max"] = quota_share(self.retained_max, count)
        return self.model_copy(update=shared)._with_sources(self.roots, count)

    def for_engine(self, restart_seconds: float) -> Self:
        """A root that is busy may belong to the process before: it is waited for, unless the file says how long."""
        if "owner_timeout_seconds" in self.model_fields_set:
            return self
        return self.model_copy(update={"owner_timeout_seconds": restart_seconds})

    @model_validator(mode="before")
    @classmethod
    def _refuse_layout(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("layout") == "files":
            raise ValueError("layout: files is a type of its own; write type: shared_fs, with root: instead of roots:")
        return given

    @model_validator(mode="after")
    def _check_budget(self) -> Self:
        if self.write_bytes_per_day is not None and self.admit != "predicted":
            raise ValueError("write_bytes_per_day needs admit: predicted, which keeps to it")
        return self

    @field_validator("roots")
    @classmethod
    def _check_roots(cls, roots: list[str]) -> list[str]:
        if len(set(roots)) != len(roots):
            raise ValueError("the same root is named twice; each root needs a folder of its own")
        return roots


class SharedFSOptions(RootOptions, SharedTierOptions):
    """Type `shared_fs`: one folder that any number of processes and hosts use at the same time."""

    type: Literal["shared_fs"] = "shared_fs"
    root: RootPath = Field(description="absolute path of a folder on a file system that all its users share")
    capacity: ByteSize = Field(description="bytes of the root, everything counted, whichever process stored it")
    max_age: MaxAge = None

    @property
    def folders(self) -> tuple[str, ...]:
        return (self.root,)

    def in_folders(self, folders: Sequence[str]) -> Self:
        if len(folders) != 1:
            raise ConfigError(f"type shared_fs takes one folder, not {len(folders)}; use a tier for each")
        return self.model_copy(update={"root": folders[0]})

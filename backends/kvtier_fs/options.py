"""Options of the filesystem tier, as they stand in a stack file."""

from __future__ import annotations

import os.path
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator

from kvtier.options import ByteSize, LowerTierOptions, Seconds, parse_size

FreeBytes = Annotated[int, BeforeValidator(parse_size), Field(ge=0)]
"""A size that may be zero."""


class FSOptions(LowerTierOptions):
    """A tier of one or more local folders, one for each disk."""

    type: Literal["fs"] = "fs"
    roots: Annotated[list[str], Field(min_length=1, max_length=64)] = Field(
        description="absolute paths of folders, one for each disk; each belongs to one process at a time"
    )
    capacity: ByteSize = Field(description="bytes of all roots together, everything counted; split equally")
    layout: Literal["slab", "files"] = Field(
        default="slab",
        description="slab: few large preallocated files, for local disks; files: one file a block, for one root on a "
        "shared or network file system that several processes and hosts use at the same time",
    )
    io_engine: Literal["auto", "io_uring", "threads"] = Field(
        default="auto", description="auto: io_uring where the kernel and the package allow it, else threads"
    )
    direct: Literal["auto", "required", "off"] = Field(
        default="auto", description="auto: past the page cache where the file system really does it"
    )
    io_depth: int = Field(default=32, ge=1, le=1024, description="requests under way at once in each root")
    io_threads: int = Field(default=8, ge=1, le=128, description="threads of each root, at most")
    region_bytes: ByteSize | None = Field(
        default=None, description="bytes of a region; chosen from the capacity and the block size when absent"
    )
    min_free_bytes: FreeBytes = Field(
        default=64 << 20, description="bytes the file system keeps free for others; 0 to use it up"
    )
    allow_network_fs: bool = Field(default=False, description="use a root on NFS, SMB, FUSE and the like all the same")
    create: bool = Field(default=True, description="create a missing root folder; its parent must exist")
    close_timeout_seconds: Seconds = Field(default=10.0, description="close waits this long for I/O under way")
    owner_timeout_seconds: float = Field(
        default=0.0,
        ge=0,
        allow_inf_nan=False,
        strict=False,
        description="open waits this long for another process to let go of a root, as when a restart overlaps",
    )

    def share(self, index: int, count: int) -> Self:
        """A folder beside each root and an equal part of the capacity; a root of layout `files` is shared as it is."""
        super().share(index, count)
        if count == 1 or self.layout == "files":
            return self
        roots = [f"{root}-{index}" for root in self.roots]
        return self.model_copy(update={"roots": roots, "capacity": self.capacity // count})

    @field_validator("roots")
    @classmethod
    def _check_roots(cls, roots: list[str]) -> list[str]:
        plain = []
        for root in roots:
            if not os.path.isabs(root) or "\0" in root:
                raise ValueError(f"{root!r} is not an absolute path")
            if ".." in root.split("/"):
                raise ValueError(f"{root!r} contains '..'; write the path it stands for")
            plain.append(os.path.normpath(root))
        if len(set(plain)) != len(plain):
            raise ValueError("the same root is named twice; each root needs a folder of its own")
        return plain

    @model_validator(mode="after")
    def _check_layout(self) -> Self:
        if self.layout == "files" and len(self.roots) != 1:
            raise ValueError("layout files takes one root; use a tier for each root")
        return self

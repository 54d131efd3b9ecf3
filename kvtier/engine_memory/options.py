"""Options of a tier below another engine's memory, beside those of its backend."""

from __future__ import annotations

from pydantic import Field

from kvtier.options import ByteSize, LowerTierOptions, Seconds


class EngineMemoryOptions(LowerTierOptions):
    """How blocks are staged between the engine's rows and the tier, and how long starting and ending may take."""

    inflight_bytes: ByteSize = Field(
        default=128 << 20, description="memory that blocks in flight pass through, one half for each direction"
    )
    copy_threads: int = Field(default=2, ge=1, le=64, description="threads that copy and hash, at most")
    drain_timeout_seconds: Seconds = Field(
        default=3.0, description="how long a shutdown or a reset waits for blocks in flight"
    )
    close_timeout_seconds: Seconds = Field(default=2.0, description="how long closing waits for I/O in flight")

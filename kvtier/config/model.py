"""The content of a valid stack file."""

from typing import Annotated, Literal

from pydantic import Field, SerializeAsAny

from kvtier.options import HintOptions, Options, RecordOptions, Seconds, TierOptions


class StackOptions(Options):
    """Options of the stack as a whole."""

    namespace: str = Field(
        default="", max_length=256, description="the operator's own tag: stacks with different tags never share a block"
    )
    block_size_factor: int | None = Field(
        default=None, ge=1, le=4096, description="GPU blocks in one offloaded block; the engine's own when left out"
    )
    state_dir: str = Field(
        default="", description="folder for what eviction policies have learned; the first lower tier's when left out"
    )
    open_timeout_seconds: Seconds = Field(
        default=300.0, description="how long each tier may take to open before opening the stack fails"
    )
    lookup_timeout_seconds: Seconds = Field(
        default=1.0, description="how long a request may wait for its hits; what it lacks then is a miss"
    )
    load_timeout_seconds: Seconds = Field(
        default=30.0, description="deadline of a load through the whole stack; what is late then is a miss"
    )
    store_timeout_seconds: Seconds = Field(
        default=10.0, description="deadline of a store through the whole stack; what is late then is dropped"
    )
    close_timeout_seconds: Seconds = Field(
        default=10.0,
        description="how long closing may drain what is in flight before it drops the rest, and may then take to write "
        "what policies have learned",
    )
    prefill_tokens_per_second: (
        Literal["measured"] | Annotated[float, Field(ge=0, allow_inf_nan=False, strict=False)]
    ) = Field(
        default=0.0,
        description="speed at which the engine computes a prompt, or measured: what a tier would load later is a miss; "
        "0: not known",
    )
    curves: bool = Field(
        default=False, description="count what each owned tier would hit at half, twice and four times its size"
    )
    stats_socket: str = Field(
        default="",
        pattern=r"^(/.*)?$",
        max_length=100,
        description="absolute path of a Unix socket that serves figures to kvtier top; none when left out",
    )
    hints: HintOptions = Field(
        default=HintOptions(), description="bounds of hints: retained_sets, retain_time, prefetch_blocks"
    )
    record: RecordOptions | None = Field(
        default=None, description="keep an anonymised trace of what is asked: folder, max_bytes, salt_file"
    )


class StackConfig(StackOptions):
    """A whole stack: its options and its tiers from the GPU's side down."""

    tiers: tuple[SerializeAsAny[TierOptions], ...] = Field(min_length=1)

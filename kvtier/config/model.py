"""The content of a valid stack file."""

from pydantic import Field, SerializeAsAny

from kvtier.options import Options, Seconds, TierOptions


class StackOptions(Options):
    """Options of the stack as a whole."""

    namespace: str = Field(
        default="", max_length=256, description="the operator's own tag: stacks with different tags never share a block"
    )
    block_size_factor: int | None = Field(
        default=None, ge=1, le=4096, description="GPU blocks in one offloaded block; the engine's own when left out"
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
        default=10.0, description="how long closing may drain what is in flight before it drops the rest"
    )


class StackConfig(StackOptions):
    """A whole stack: its options and its tiers from the GPU's side down."""

    tiers: tuple[SerializeAsAny[TierOptions], ...] = Field(min_length=1)

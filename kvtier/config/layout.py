"""The text form of a KV layout: `full:page=32KiB,block=16;sliding_window:page=16KiB,block=16,window=512`.

A page is one GPU block of one group on one worker, all layers and tensors of the group together. Instead of its bytes
the shape of the model may be given, `full:layers=32,kv_heads=8,head_dim=128,dtype=bfloat16,block=16`; then::

    page bytes = 2 (K and V) * layers * ceil(kv_heads / world_size) * head_dim * bytes of dtype * block

or that of a model with latent attention (MLA), `full:layers=61,latent_dim=576,dtype=bfloat16,block=64`; then::

    page bytes = layers * latent_dim * bytes of dtype * block

and where all groups are latent, a block is kept once, whatever the number of workers. The same keys make a YAML or JSON
file with `groups`, `world_size`, `block_size_factor` and `replicated`.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from kvtier.config.load import validate
from kvtier.config.strict_yaml import Value, parse_text, read_text
from kvtier.errors import ConfigError
from kvtier.options import ByteSize, Options
from kvtier.types.dtypes import AUTO, AUTO_DTYPE, canonical_dtype, dtype_bytes
from kvtier.types.geometry import GroupKind, GroupLayout, KVLayout, TensorRef

DEFAULT_LAYOUT = "full:layers=32,kv_heads=8,head_dim=128,dtype=bfloat16,block=16"
"""A dense model of about eight billion parameters."""
_FILES = (".yaml", ".yml", ".json")


class GroupOptions(Options):
    """A KV cache group, by the bytes of its page or by the shape of its layers."""

    kind: Literal["full", "sliding_window", "mamba"] = "full"
    page: ByteSize | None = Field(default=None, description="bytes of one GPU block of the group on one worker")
    block: int = Field(default=16, ge=1, description="tokens in one GPU block")
    window: int = Field(default=0, ge=0, description="tokens a sliding window looks back")
    layers: int | None = Field(default=None, ge=1, description="layers in the group")
    kv_heads: int | None = Field(default=None, ge=1, description="KV heads of the model, over all workers")
    head_dim: int | None = Field(default=None, ge=1, description="elements of one head")
    latent_dim: int | None = Field(
        default=None, ge=1, description="elements of one token's latent in one layer (MLA: kv_lora_rank and rope)"
    )
    dtype: str = Field(default=AUTO_DTYPE, description="type of one element, as bfloat16, fp16, fp8 or float8_e5m2")

    @field_validator("dtype")
    @classmethod
    def _known(cls, dtype: str) -> str:
        dtype_bytes(dtype)
        name = canonical_dtype(dtype)
        return AUTO_DTYPE if name == AUTO else name

    @model_validator(mode="after")
    def _consistent(self) -> GroupOptions:
        heads, latent = (self.kv_heads, self.head_dim), self.latent_dim
        if self.page is not None:
            if any(part is not None for part in (self.layers, latent, *heads)):
                raise ValueError("give page or the shape of the layers, not both")
        elif latent is not None and any(part is not None for part in heads):
            raise ValueError("give latent_dim, or kv_heads and head_dim, not both")
        elif self.layers is None or (latent is None and None in heads):
            raise ValueError("give either page, or layers, kv_heads and head_dim, or layers and latent_dim")
        if (self.kind == "sliding_window") != (self.window > 0):
            raise ValueError("window goes with sliding_window groups, and only with them")
        return self

    def page_bytes(self, world_size: int) -> int:
        """Bytes of one GPU block of the group on one worker."""
        if self.page is not None:
            return self.page
        heads = -(-(self.kv_heads or 0) // world_size)
        elements = self.latent_dim or 2 * heads * (self.head_dim or 0)
        return (self.layers or 0) * elements * dtype_bytes(self.dtype) * self.block


class LayoutOptions(Options):
    """A whole KV layout."""

    groups: tuple[GroupOptions, ...] = Field(min_length=1)
    world_size: int = Field(default=1, ge=1, le=65536, description="workers that hold a slice of each block")
    block_size_factor: int = Field(default=1, ge=1, le=4096, description="GPU blocks in one offloaded block")
    replicated: bool | None = Field(
        default=None,
        description="whether the workers' pages hold the same bytes, so that one copy is kept; if left out, whether "
        "every group is described by latent_dim",
    )

    def layout(self, world_size: int | None = None, factor: int | None = None) -> KVLayout:
        """The layout for the geometry; an argument replaces the option of its name."""
        workers = world_size or self.world_size
        groups = tuple(
            GroupLayout(
                (TensorRef(index, group.page_bytes(workers)),), group.block, GroupKind(group.kind), group.window
            )
            for index, group in enumerate(self.groups)
        )
        replicated = self.replicated
        if replicated is None:
            replicated = all(group.latent_dim is not None for group in self.groups)
        return KVLayout(groups, workers, factor or self.block_size_factor, replicated)


def read_layout(spec: str) -> LayoutOptions:
    """A layout from its text form, or from the YAML or JSON file that `spec` names.

    Raises ConfigError with one line for each thing that is wrong, the path beginning with `layout`.
    """
    if spec.endswith(_FILES):
        return validate(LayoutOptions, parse_text(read_text(spec)), "layout")
    parts = [part.strip() for part in spec.split(";") if part.strip()]
    if not parts:
        raise ConfigError(f"is empty; write for example {DEFAULT_LAYOUT}", "layout")
    groups: list[Value] = [_group(part, f"layout.groups[{index}]") for index, part in enumerate(parts)]
    return validate(LayoutOptions, {"groups": groups}, "layout")


def _group(text: str, at: str) -> dict[str, Value]:
    kind, _, rest = text.partition(":")
    group: dict[str, Value] = {"kind": kind.strip()}
    for item in rest.split(","):
        key, equals, value = (part.strip() for part in item.partition("="))
        if not (key and equals and value):
            raise ConfigError(f"{item.strip()[:40]!r} is no key=value; write for example full:page=32KiB,block=16", at)
        if key in group:
            raise ConfigError(f"{key[:40]} is given twice; keep one", at)
        group[key] = int(value) if value.isascii() and value.isdigit() and len(value) <= 18 else value
    return group

"""An engine's KV tensors as plain bytes, checked once when the tier is opened.

Engines pass tensors of any type, sliced out of larger ones or packed several to a storage. A copy needs only where
page 0 begins, how far apart pages are and how long a page is; a `KVTensor` says that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtier.errors import GeometryError
from kvtier.types.geometry import Geometry

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, eq=False)
class KVTensor:
    """A KV tensor as bytes: `num_blocks` pages of `page_bytes` bytes, `stride_bytes` apart, the first at `address`.

    `tensor` keeps the memory alive.
    """

    tensor: torch.Tensor
    address: int
    stride_bytes: int
    page_bytes: int
    num_blocks: int

    @property
    def end(self) -> int:
        """The address after the last page's last byte."""
        return self.address + (self.num_blocks - 1) * self.stride_bytes + self.page_bytes

    @property
    def nbytes(self) -> int:
        """Bytes of all pages, without what lies between them."""
        return self.num_blocks * self.page_bytes

    def pages(self, length: int, width: int = 1) -> torch.Tensor:
        """The first `length` bytes of every page as a (num_blocks, length // width) tensor of `width`-byte integers,
        a view of the engine's memory. `width` must divide the address, the stride and the length."""
        import torch

        dtype = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[width]
        storage = self.tensor.untyped_storage()
        offset = self.address - storage.data_ptr()
        flat = torch.empty(0, dtype=dtype, device=self.tensor.device)
        shape, stride = (self.num_blocks, length // width), (self.stride_bytes // width, 1)
        return flat.set_(storage, offset // width, shape, stride)


def describe_tensor(tensor: torch.Tensor, name: str) -> KVTensor:
    """The bytes of one KV tensor. GeometryError, naming the tensor, if its pages are not contiguous or overlap."""
    import torch

    if tensor.layout is not torch.strided or tensor.device.type == "meta":
        raise GeometryError(f"{name} is no dense tensor with memory of its own ({tensor.layout}, {tensor.device})")
    if tensor.dim() < 2 or tensor.numel() == 0:
        raise GeometryError(
            f"{name} has shape {tuple(tensor.shape)}; a KV tensor is (num_blocks, page bytes), not empty"
        )
    inner = 1
    for size, stride in zip(reversed(tensor.shape[1:]), reversed(tensor.stride()[1:]), strict=True):
        if size > 1 and stride != inner:
            raise GeometryError(f"the pages of {name} are not contiguous: strides {tensor.stride()}")
        inner *= size
    page_bytes = inner * tensor.element_size()
    num_blocks = tensor.shape[0]
    stride_bytes = tensor.stride(0) * tensor.element_size()
    if num_blocks > 1 and stride_bytes < page_bytes:
        raise GeometryError(f"the pages of {name} overlap: {page_bytes} bytes each, {stride_bytes} bytes apart")
    return KVTensor(tensor, tensor.data_ptr(), max(stride_bytes, page_bytes), page_bytes, num_blocks)


def describe_tensors(tensors: Sequence[torch.Tensor], geometry: Geometry) -> tuple[KVTensor, ...]:
    """Check an engine's tensors against its layout and describe them as bytes, one KVTensor for each.

    GeometryError names the tensor that does not fit: missing, of no group, with too small pages, on another device,
    or with pages that are not contiguous.
    """
    found = tuple(describe_tensor(tensor, f"KV tensor {index}") for index, tensor in enumerate(tensors))
    used = set()
    for group, layout in enumerate(geometry.layout.groups):
        for ref in layout.refs:
            if ref.tensor >= len(found):
                raise GeometryError(f"group {group} refers to KV tensor {ref.tensor} of {len(found)}")
            have = found[ref.tensor].page_bytes
            if ref.page_size_bytes > have:
                raise GeometryError(
                    f"group {group} needs pages of {ref.page_size_bytes} bytes, "
                    f"those of KV tensor {ref.tensor} have {have}"
                )
            used.add(ref.tensor)
    for index, tensor in enumerate(tensors):
        if index not in used:
            raise GeometryError(f"KV tensor {index} belongs to no group of the layout")
        if tensor.device != tensors[0].device:
            raise GeometryError(f"KV tensor {index} is on {tensor.device}, KV tensor 0 on {tensors[0].device}")
    return found

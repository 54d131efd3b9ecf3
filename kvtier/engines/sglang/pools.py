"""The places of pages in SGLang's host pools, by the addresses that every pool gives for zero-copy storage."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch

from kvtier.engines.engine_memory.memory import Pieces
from kvtier.errors import ConfigError

LAYOUTS = ("layer_first", "page_first", "page_first_direct")
Addresses = list[tuple[int, int]]
"""(address, length) of each piece of one page, in the pool's order."""


@dataclass(frozen=True, slots=True)
class HostPool:
    """A host pool of SGLang under its name: `pages` pages of `page_size` tokens or states, at `pieces`."""

    name: str
    page_size: int
    pages: int
    pieces: tuple[Pieces, ...]
    layout: str
    dtype: str

    @classmethod
    def of(cls, name: str, pool: Any) -> HostPool:
        """The description of a pool. Raises ConfigError, with its name, for one whose pages cannot be addressed."""
        layout = str(getattr(pool, "layout", ""))
        if layout not in LAYOUTS:
            raise ConfigError(f"has the layout {layout}; kvtier serves {', '.join(LAYOUTS)}", f"host pool {name}")
        page_size = int(pool.page_size)
        pages = int(pool.size) // page_size
        pieces = tuple(_pieces(name, pool, page_size, pages))
        return cls(name, page_size, pages, pieces, layout, _dtype(pool))

    @property
    def piece_bytes(self) -> list[int]:
        """Bytes of each piece of a page, in order."""
        return [each.length for each in self.pieces for _ in range(each.count)]

    def places(self, host_indices: torch.Tensor | None, count: int) -> list[int] | None:
        """The pages of `count` keys; None unless there is one whole page for each."""
        if host_indices is None or host_indices.numel() != count * self.page_size:
            return None
        starts = host_indices[:: self.page_size]
        if bool((starts % self.page_size).any()):
            return None
        places: list[int] = (starts // self.page_size).tolist()
        return places


def _dtype(pool: Any) -> str:
    """The type of a pool's elements. That of Mamba's second state is named unless it is the first's, or float32, which
    shows in the size of a piece."""
    first, second = str(pool.dtype), str(getattr(pool, "temporal_dtype", pool.dtype))
    return first if second in (first, str(torch.float32)) else f"{first}/{second}"


def _pieces(name: str, pool: Any, page_size: int, pages: int) -> Iterator[Pieces]:
    """The pieces of all pages. Raises ConfigError unless they are spaced as in the first two pages."""
    first = _addresses(name, pool, 0, page_size)
    second = _addresses(name, pool, 1, page_size) if pages > 1 else first
    strides = [after - before for (before, _), (after, _) in zip(first, second, strict=True)]
    for page in {pages // 2, pages - 1}:
        expected = [(address + page * stride, size) for (address, size), stride in zip(first, strides, strict=True)]
        if pages > 1 and _addresses(name, pool, page, page_size) != expected:
            raise ConfigError("does not lay out all its pages alike", f"host pool {name}")
    described = [(address, size, max(stride, 1)) for (address, size), stride in zip(first, strides, strict=True)]
    if pool.layout == "layer_first":  # keys and values of a layer alternate; the layers of each are evenly spaced
        described = described[::2] + described[1::2]
    for (size, page_stride), run in groupby(described, key=lambda piece: piece[1:]):
        yield from _runs([address for address, *_ in run], size, pages, page_stride)


def _runs(addresses: Sequence[int], size: int, pages: int, page_stride: int) -> Iterator[Pieces]:
    """Pieces of one length, those that are evenly spaced together."""
    start = 0
    while start < len(addresses):
        stride = addresses[start + 1] - addresses[start] if start + 1 < len(addresses) else 0
        end = start + 1
        while stride > 0 and end < len(addresses) and addresses[end] - addresses[end - 1] == stride:
            end += 1
        yield Pieces(addresses[start], size, end - start, max(stride, 0), pages, page_stride)
        start = end


def _addresses(name: str, pool: Any, page: int, page_size: int) -> Addresses:
    indices = torch.arange(page * page_size, (page + 1) * page_size, dtype=torch.int64)
    try:
        found = pool.get_page_buffer_meta(indices)
    except (AttributeError, NotImplementedError, ValueError) as error:
        raise ConfigError(f"gives no addresses of its pages: {error}", f"host pool {name}") from error
    if not found or not found[0]:
        raise ConfigError(
            "keeps no bytes: models whose pages are in side pools alone are not served", f"host pool {name}"
        )
    return list(zip(map(int, found[0]), map(int, found[1]), strict=True))

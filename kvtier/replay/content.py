"""What every GPU block must hold: a function of its full key, so that a wrong byte names its owner.

The page of a GPU block in tensor reference r of its group is the sequence of 64-bit words `base + i * STEP`, with
`base = mix(xxh3_64(key) + r * PART)`, cut to the page's bytes. `mix` is a bijection, so a page found in the wrong
place tells by its words which key it belongs to. The key is the GPU block's own (the chain up to its end), so an
offloaded block holds the contents of its sub-blocks' keys side by side, as real KV does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from kvtier.geometry import GroupLayout
from kvtier.jobs import IntArray
from kvtier.keys import OffloadKey

WORD_BYTES = 8
STEP = 0x9E3779B97F4A7C15
PART = 0xD1342543DE82EF95
MASK = (1 << 64) - 1
BATCH_BYTES = 32 << 20

Words = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class WrongPage:
    """One page that does not hold what its key says.

    `first_byte` is the first wrong byte's offset in the page, `wrong_bytes` how many are wrong in all. `origin` tells
    whose content most of the page is (see `find_owners`); None if it is nobody's.
    """

    key: OffloadKey
    tensor: int
    gpu_block: int
    first_byte: int
    wrong_bytes: int
    origin: int | None


@dataclass(frozen=True, slots=True, eq=False)
class Pages:
    """GPU blocks of one group: the key and the block id of each."""

    keys: Sequence[OffloadKey]
    gpu_blocks: IntArray

    def select(self, positions: IntArray) -> Pages:
        """The pages at some positions."""
        return Pages([self.keys[position] for position in positions.tolist()], self.gpu_blocks[positions])


class BlockContent:
    """Writes and checks the pages of one group in an engine's KV tensors.

    `on_host` (the default for CPU tensors) goes page by page through numpy, which is several times faster there than
    torch's indexing; otherwise pages are computed in batches on the tensors' device.
    """

    def __init__(self, layout: GroupLayout, tensors: Sequence[torch.Tensor], on_host: bool | None = None) -> None:
        self._refs = layout.refs
        self._tensors = [tensors[ref.tensor].view(torch.uint8) for ref in layout.refs]
        device = self._tensors[0].device
        self._on_host = device.type == "cpu" if on_host is None else on_host
        words = max(-(-ref.page_size_bytes // WORD_BYTES) for ref in layout.refs)
        self._ramp: Words = np.arange(words, dtype=np.uint64) * np.uint64(STEP)
        self._scratch = np.empty_like(self._ramp)
        self._equal = np.empty(words * WORD_BYTES, dtype=np.bool_)
        self._device_ramp = torch.from_numpy(self._ramp.view(np.int64)).to(device) if not self._on_host else None

    def write(self, pages: Pages) -> None:
        """Compute the pages: afterwards each GPU block holds what its key says, in every tensor."""
        for ref in range(len(self._refs)):
            bases = self._bases(pages, ref)
            if self._on_host:
                self._write_host(ref, bases, pages.gpu_blocks)
            else:
                for batch in self._batches(ref, len(bases)):
                    wanted = self._wanted(ref, bases[batch])
                    ids = torch.from_numpy(pages.gpu_blocks[batch]).to(wanted.device)
                    size = wanted.shape[1]
                    self._tensors[ref][:, :size].index_copy_(0, ids, wanted)

    def check(self, pages: Pages) -> list[WrongPage]:
        """Compare every byte of the pages; return the wrong ones (none: all as stored)."""
        wrong = []
        for ref in range(len(self._refs)):
            bases = self._bases(pages, ref)
            check = self._check_host if self._on_host else self._check_device
            wrong += [self._describe(pages, ref, bases, index) for index in check(ref, bases, pages.gpu_blocks)]
        return wrong

    def _bases(self, pages: Pages, ref: int) -> Words:
        hashes = np.fromiter((xxhash.xxh3_64_intdigest(key) for key in pages.keys), np.uint64, len(pages.keys))
        return mix(hashes + np.uint64(ref * PART & MASK))

    def _write_host(self, ref: int, bases: Words, gpu_blocks: IntArray) -> None:
        size, words = self._sizes(ref)
        ramp, scratch = self._ramp[:words], self._scratch[:words]
        page = scratch.view(np.uint8)[:size]
        array = self._tensors[ref].numpy()
        for base, block in zip(bases, gpu_blocks.tolist(), strict=True):
            np.add(ramp, base, out=scratch)
            array[block, :size] = page

    def _check_host(self, ref: int, bases: Words, gpu_blocks: IntArray) -> list[int]:
        size, words = self._sizes(ref)
        ramp, scratch, equal = self._ramp[:words], self._scratch[:words], self._equal[:size]
        page = scratch.view(np.uint8)[:size]
        array = self._tensors[ref].numpy()
        wrong = []
        for index, (base, block) in enumerate(zip(bases, gpu_blocks.tolist(), strict=True)):
            np.add(ramp, base, out=scratch)
            if not np.equal(array[block, :size], page, out=equal).all():
                wrong.append(index)
        return wrong

    def _check_device(self, ref: int, bases: Words, gpu_blocks: IntArray) -> list[int]:
        wrong: list[int] = []
        for batch in self._batches(ref, len(bases)):
            wanted = self._wanted(ref, bases[batch])
            ids = torch.from_numpy(gpu_blocks[batch]).to(wanted.device)
            found = self._tensors[ref][:, : wanted.shape[1]].index_select(0, ids)
            good = (found == wanted).all(dim=1).cpu().numpy()
            wrong += (np.flatnonzero(~good) + batch.start).tolist()
        return wrong

    def _sizes(self, ref: int) -> tuple[int, int]:
        size = self._refs[ref].page_size_bytes
        return size, -(-size // WORD_BYTES)

    def _batches(self, ref: int, count: int) -> list[slice]:
        step = max(1, BATCH_BYTES // self._refs[ref].page_size_bytes)
        return [slice(start, min(start + step, count)) for start in range(0, count, step)]

    def _wanted(self, ref: int, bases: Words) -> torch.Tensor:
        """The pages as they must be, uint8 of shape (pages, page bytes), on the tensors' device."""
        size, words = self._sizes(ref)
        assert self._device_ramp is not None
        column = torch.from_numpy(bases.view(np.int64)).to(self._device_ramp.device)[:, None]
        return (column + self._device_ramp[:words]).view(torch.uint8)[:, :size]

    def _describe(self, pages: Pages, ref: int, bases: Words, index: int) -> WrongPage:
        size, words = self._sizes(ref)
        block = int(pages.gpu_blocks[index])
        found = self._tensors[ref][block, :size].cpu().numpy()
        expected = (self._ramp[:words] + bases[index]).view(np.uint8)[:size]
        differs = np.flatnonzero(found != expected)
        return WrongPage(
            key=pages.keys[index],
            tensor=self._refs[ref].tensor,
            gpu_block=block,
            first_byte=int(differs[0]) if len(differs) else 0,
            wrong_bytes=len(differs),
            origin=origin_of(found),
        )


def mix(values: Words) -> Words:
    """The finaliser of splitmix64: a bijection on 64-bit words."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Words = values ^ (values >> np.uint64(31))
    return mixed


def unmix(value: int) -> int:
    """The inverse of `mix` for one word."""
    value = _unshift(value, 31)
    value = _unshift((value * pow(0x94D049BB133111EB, -1, 1 << 64)) & MASK, 27)
    return _unshift((value * pow(0xBF58476D1CE4E5B9, -1, 1 << 64)) & MASK, 30)


def origin_of(page: npt.NDArray[np.uint8]) -> int | None:
    """The unmixed base of a page, judged by the first two neighbouring words that agree; None if none do."""
    words = np.frombuffer(page.tobytes()[: len(page) // WORD_BYTES * WORD_BYTES], np.uint64)
    agree = np.flatnonzero(words[:-1] + np.uint64(STEP) == words[1:])
    if not len(agree):
        return None
    index = int(agree[0])
    return unmix((int(words[index]) - index * STEP) & MASK)


def find_owners(origins: Iterable[int], keys: Iterable[OffloadKey], parts: int) -> dict[int, OffloadKey]:
    """Which of the keys each origin belongs to, in one of `parts` tensor references. Stops when all are found."""
    wanted = {(origin - part * PART) & MASK: origin for origin in origins for part in range(parts)}
    missing = set(wanted.values())
    found: dict[int, OffloadKey] = {}
    for key in keys:
        if not missing:
            break
        origin = wanted.get(xxhash.xxh3_64_intdigest(key))
        if origin is not None and origin in missing:
            missing.remove(origin)
            found[origin] = key
    return found


def _unshift(value: int, shift: int) -> int:
    result = value
    for _ in range(64 // shift):
        result = value ^ (result >> shift)
    return result

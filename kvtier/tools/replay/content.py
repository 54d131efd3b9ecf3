"""The expected content of every GPU block: a function of its full key, so that a wrong byte identifies its owner.

The page of a GPU block in tensor reference r of its group is the sequence of 64-bit words `base + i * STEP`, with
`base = mix(xxh3_64(key) + r * PART)`, shortened to the page's bytes. The base of a page in the wrong place can be read
from its words, and identifies the key that the page belongs to. The key is the GPU block's own (the chain up to its
end), so an offloaded block holds the contents of its sub-blocks' keys side by side, as real KV does.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from kvtier.types.arrays import IntArray
from kvtier.types.geometry import GroupLayout
from kvtier.types.keys import OffloadKey

WORD_BYTES = 8
STEP = 0x9E3779B97F4A7C15
PART = 0xD1342543DE82EF95
MASK = (1 << 64) - 1
BATCH_BYTES = 32 << 20

Words = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class WrongPage:
    """A page that does not hold the content of its key.

    `first_byte` is the first wrong byte's offset in the page, `wrong_bytes` how many are wrong in all. `origin` names
    the owner of most of the page (see `find_owners`); None if no key fits.
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


class BlockContent:
    """Writes and checks the pages of one group in an engine's KV tensors.

    `on_host` (the default for CPU tensors) goes page by page through numpy, which is several times faster there than
    torch's indexing; otherwise pages are computed in batches on the tensors' device.
    """

    def __init__(self, layout: GroupLayout, tensors: Sequence[torch.Tensor], on_host: bool | None = None) -> None:
        self._refs = layout.refs
        parts = [tensors[ref.tensor].view(torch.uint8) for ref in layout.refs]
        self._device = parts[0].device
        self._on_host = self._device.type == "cpu" if on_host is None else on_host
        self._tensors: Sequence[Any] = [part.numpy() for part in parts] if self._on_host else parts
        words = max(-(-ref.page_size_bytes // WORD_BYTES) for ref in layout.refs)
        self._ramp: Words = np.arange(words, dtype=np.uint64) * np.uint64(STEP)

    def write(self, pages: Pages) -> None:
        """Fill the pages: afterwards each GPU block holds the content of its key, in every tensor."""
        for ref, tensor in enumerate(self._tensors):
            for _, blocks, wanted in self._batches(ref, pages):
                tensor[blocks, : wanted.shape[-1]] = wanted

    def check(self, pages: Pages) -> list[WrongPage]:
        """Compare every byte of the pages; return the wrong ones (none: all as stored)."""
        wrong = []
        for ref, tensor in enumerate(self._tensors):
            for first, blocks, wanted in self._batches(ref, pages):
                same = (tensor[blocks, : wanted.shape[-1]] == wanted).all(-1)
                if not same.all():
                    differing = np.flatnonzero(~np.array(same.tolist(), ndmin=1)) + first
                    wrong += [self._describe(pages, ref, position) for position in differing.tolist()]
        return wrong

    def _batches(self, ref: int, pages: Pages) -> Iterator[tuple[int, Any, Any]]:
        """(position of the first, GPU blocks, what they must hold): one page as an array, or many as tensors."""
        size = self._refs[ref].page_size_bytes
        ramp, bases = self._ramp[: -(-size // WORD_BYTES)], _bases(pages.keys, ref)
        if self._on_host:
            words = np.empty_like(ramp)
            page = words.view(np.uint8)[:size]
            for position, block in enumerate(pages.gpu_blocks.tolist()):
                np.add(ramp, bases[position], out=words)
                yield position, block, page
            return
        device_ramp = torch.from_numpy(ramp.view(np.int64)).to(self._device)
        step = max(1, BATCH_BYTES // size)
        for first in range(0, len(bases), step):
            column = torch.from_numpy(bases[first : first + step].view(np.int64)).to(self._device)[:, None]
            blocks = torch.from_numpy(pages.gpu_blocks[first : first + step]).to(self._device)
            yield first, blocks, (column + device_ramp).view(torch.uint8)[:, :size]

    def _describe(self, pages: Pages, ref: int, position: int) -> WrongPage:
        size, block = self._refs[ref].page_size_bytes, int(pages.gpu_blocks[position])
        found = torch.as_tensor(self._tensors[ref][block, :size]).cpu().numpy()
        expected = (self._ramp + _bases(pages.keys[position : position + 1], ref)).view(np.uint8)[:size]
        differs = np.flatnonzero(found != expected)
        return WrongPage(
            key=pages.keys[position],
            tensor=self._refs[ref].tensor,
            gpu_block=block,
            first_byte=int(differs[0]) if len(differs) else 0,
            wrong_bytes=len(differs),
            origin=origin_of(found),
        )


def _bases(keys: Sequence[OffloadKey], ref: int) -> Words:
    hashes = np.fromiter(map(xxhash.xxh3_64_intdigest, keys), np.uint64, len(keys))
    return mix(hashes + np.uint64(ref * PART & MASK))


def mix(values: Words) -> Words:
    """The finaliser of splitmix64: a bijection on 64-bit words."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Words = values ^ (values >> np.uint64(31))
    return mixed


def origin_of(page: npt.NDArray[np.uint8]) -> int | None:
    """The base of a page, judged by the first two neighbouring words that agree; None if none do."""
    words = np.frombuffer(page.tobytes()[: len(page) // WORD_BYTES * WORD_BYTES], np.uint64)
    agree = np.flatnonzero(words[:-1] + np.uint64(STEP) == words[1:])
    return (int(words[agree[0]]) - int(agree[0]) * STEP) & MASK if len(agree) else None


def find_owners(origins: Iterable[int], keys: Iterable[OffloadKey], parts: int) -> dict[int, OffloadKey]:
    """The key that each origin belongs to, in one of `parts` tensor references. Stops when all are found."""
    missing = set(origins)
    found: dict[int, OffloadKey] = {}
    for key in keys:
        if not missing:
            break
        of_key = missing.intersection(int(_bases([key], part)[0]) for part in range(parts))
        found |= dict.fromkeys(of_key, key)
        missing -= of_key
    return found

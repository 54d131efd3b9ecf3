"""What measured blocks hold: random words, others in every block, so that every byte can be checked."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

WIPED = 0xEE
"""What rows and tensors are overwritten with before blocks come back."""

_STEP = 0x9E3779B97F4A7C15
_WORD = 8


class Pattern:
    """The content of blocks of `block_bytes`, a multiple of 8: block `n` is one random block XOR a word of its own."""

    def __init__(self, block_bytes: int, seed: int) -> None:
        self._base = np.frombuffer(np.random.default_rng(seed).bytes(block_bytes), dtype=np.uint64)

    def fill(self, rows: Bytes, first: int) -> None:
        """Write blocks `first`, `first + 1`, ... into the rows of a (blocks, bytes) array."""
        words = rows.view(np.uint64)
        for row in range(len(words)):
            np.bitwise_xor(self._base, _word(first + row), out=words[row])

    def wrong(self, rows: Bytes, first: int) -> int:
        """How many rows of a (blocks, bytes) array do not hold what `fill` wrote with the same `first`."""
        words = rows.view(np.uint64)
        return sum(
            not np.array_equal(np.bitwise_xor(words[row], _word(first + row)), self._base) for row in range(len(words))
        )


def _word(number: int) -> np.uint64:
    return np.uint64(number * _STEP % (1 << 64))

"""The name of a block of tokens: a hash over it and everything before it.

    root    = SHA-256("kvtier/transformers/1" + SHA-256(salt))
    block i = SHA-256(block i - 1, or the root + the block's token ids, 8 bytes each, little-endian)

So two prompts share the names of exactly those blocks up to which they, and their salts, are the same. The string in
the root is the fixed seed; nothing depends on the process or on Python's own hashing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvtier.errors import UsageError
from kvtier.types.keys import OffloadKey, make_key

if TYPE_CHECKING:
    import torch

HASH_ALGORITHM = "sha256"
HASH_SEED = "kvtier/transformers/1"

Tokens = npt.NDArray[np.int64]


def token_array(token_ids: Sequence[int] | torch.Tensor | npt.NDArray[np.integer]) -> Tokens:
    """Token ids as one flat array: a sequence of numbers, or a tensor or array of shape (tokens,) or (1, tokens).

    Raises UsageError for anything else, more than one sequence among it.
    """
    # A tensor on any device comes to the host by `tolist`, without torch being imported here.
    raw = token_ids.tolist() if hasattr(token_ids, "tolist") else list(token_ids)
    try:
        array = np.array(raw)
    except ValueError as error:
        raise UsageError("token ids are one sequence of whole numbers; batches are not supported") from error
    if array.ndim == 2 and array.shape[0] == 1:
        array = array[0]
    if array.ndim != 1:
        raise UsageError(f"token ids are one sequence, got shape {array.shape}; batches are not supported")
    if array.size and array.dtype.kind not in "iu":
        raise UsageError(f"token ids are whole numbers, got {array.dtype}")
    return array.astype(np.int64)


def block_keys(tokens: Tokens, block_tokens: int, salt: bytes = b"") -> list[OffloadKey]:
    """The keys of the whole blocks of `block_tokens` tokens; what is left at the end has none."""
    digest = hashlib.sha256(HASH_SEED.encode() + hashlib.sha256(salt).digest()).digest()
    data = tokens.astype("<i8").tobytes()
    step = block_tokens * 8
    keys = []
    for start in range(0, len(data) - step + 1, step):
        digest = hashlib.sha256(digest + data[start : start + step]).digest()
        keys.append(make_key(digest, group=0))
    return keys

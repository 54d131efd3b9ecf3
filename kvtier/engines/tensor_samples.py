"""Samples of a file of weights that touch every tensor: read in milliseconds, where the whole takes seconds a GB."""

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SAMPLE_BYTES = 1024
PIECES_MAX = 16
SAMPLES_MAX = 1 << 14
"""So many pieces of a file; with more tensors than this, a piece of each."""
HEADER_BYTES_MAX = 100 << 20
"""As the format has it."""
LENGTH_BYTES = 8


def tensor_samples(path: Path) -> str:
    """SHA-256, in hex, over the header of a safetensors file and pieces of each tensor, or the whole of a small one.

    Empty for a file of another format. Raises OSError for one that cannot be read.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(descriptor).st_size
        length = int.from_bytes(os.pread(descriptor, LENGTH_BYTES, 0), "little")
        if not 0 < length <= min(HEADER_BYTES_MAX, size - LENGTH_BYTES):
            return ""
        header = os.pread(descriptor, length, LENGTH_BYTES)
        digest = hashlib.sha256(b"%d " % size + header)
        for first, end in _pieces(header):
            digest.update(os.pread(descriptor, end - first, LENGTH_BYTES + length + first))
        return digest.hexdigest()
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return ""  # no header of tensors
    finally:
        os.close(descriptor)


def _pieces(header: bytes) -> Iterator[tuple[int, int]]:
    """Of each tensor up to 16 pieces, evenly spread from its first byte to its last."""
    tensors = {name: tensor for name, tensor in json.loads(header).items() if name != "__metadata__"}
    count = max(1, min(PIECES_MAX, SAMPLES_MAX // max(1, len(tensors))))
    for first, end in sorted(map(_span, tensors.values())):
        if end - first <= count * SAMPLE_BYTES:
            yield first, end
        else:
            step = (end - first - SAMPLE_BYTES) / max(1, count - 1)
            starts = (first + int(number * step) for number in range(count))
            yield from ((start, start + SAMPLE_BYTES) for start in starts)


def _span(tensor: Any) -> tuple[int, int]:
    first, end = tensor["data_offsets"]
    if not 0 <= first <= end:
        raise ValueError(f"no span: {first} to {end}")
    return int(first), int(end)

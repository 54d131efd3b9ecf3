"""Classes of segments and buckets of age: the keys of the life tables.

A segment's class at its last use is a path in a hierarchy: how often it was used, the gap before that use, the new
blocks of the request that used it, and the output of that request (unknown until it ends).
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Final

USES: Final = ("its first", "its second", "its third to fifth", "its sixth to ninth", "any later")
GAPS: Final = (20.0, 60.0, 150.0, 600.0)
OUTPUTS: Final = (20, 100, 400)
NEW_LEVELS: Final = 6
OUTPUT_LEVELS: Final = len(OUTPUTS) + 2
GAP_LEVELS: Final = len(GAPS) + 2
SHAPE: Final = (len(USES), GAP_LEVELS, NEW_LEVELS, OUTPUT_LEVELS)
NUM_CLASSES: Final = SHAPE[0] * SHAPE[1] * SHAPE[2] * SHAPE[3]
NUM_BUCKETS: Final = 40
FIRST_BUCKET_SECONDS: Final = 2.0
BUCKET_RATIO: Final = 1.35
USES_MAX: Final = 255
LEFT: Final = 0
"""The class of what a later prompt left behind in a segment, until it is used: a segment that a request makes has new
blocks. A block that was not full when its prompt ended is one, and never comes back."""

BUCKET_BOUNDS: Final = [FIRST_BUCKET_SECONDS * BUCKET_RATIO**power for power in range(NUM_BUCKETS - 1)]
"""The lower bounds of all buckets but the first, in seconds."""
_GAP_BOUNDS: Final = (0.0, *GAPS)
_USE_LEVEL: Final = bytes([0, 0, 1, 2, 2, 2, 3, 3, 3, 3] + [4] * (USES_MAX - 9))
_USE_STRIDE: Final = GAP_LEVELS * NEW_LEVELS * OUTPUT_LEVELS
_GAP_STRIDE: Final = NEW_LEVELS * OUTPUT_LEVELS


def bucket_of(age: float) -> int:
    """The bucket of an age in seconds: [0, 2), [2, 2.7), [2.7, 3.6) and so on; the last one begins at two days."""
    return bisect_right(BUCKET_BOUNDS, age)


def class_of(uses: int, gap: float, new_level: int) -> int:
    """The class of a segment used `uses` times, the last time `gap` seconds after the time before (negative: none)."""
    return _USE_LEVEL[uses] * _USE_STRIDE + bisect_right(_GAP_BOUNDS, gap) * _GAP_STRIDE + new_level * OUTPUT_LEVELS


def first_use_of(kind: int) -> int:
    """The class of a segment that is used for the first time when one of this class was used again."""
    return kind % _USE_STRIDE


def new_level(blocks: int) -> int:
    """Powers of four: none, 1 to 3, 4 to 15, and so on."""
    level = (blocks.bit_length() + 1) >> 1
    return level if level < NEW_LEVELS else NEW_LEVELS - 1


def output_level(tokens: int) -> int:
    """Level from 1 on: which of `OUTPUTS` it is below. 0 is an output of unknown length."""
    return bisect_right(OUTPUTS, tokens) + 1

"""The names of blocks of tokens: as documented, and shared by exactly the same prefixes."""

from __future__ import annotations

import hashlib
import struct

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvtier.engines.transformers.model import block_keys, token_array
from kvtier.errors import UsageError
from kvtier.types.keys import key_group, key_hash

PROMPTS = st.lists(st.integers(0, 3), max_size=24)


def test_the_hash_is_the_documented_one() -> None:
    root = hashlib.sha256(b"kvtier/transformers/1" + hashlib.sha256(b"").digest()).digest()
    first = hashlib.sha256(root + struct.pack("<4q", 5, 6, 7, 8)).digest()
    second = hashlib.sha256(first + struct.pack("<4q", 1, 2, 3, 2**40)).digest()
    keys = block_keys(token_array([5, 6, 7, 8, 1, 2, 3, 2**40, 9]), 4)
    assert [key_hash(key) for key in keys] == [first, second]
    assert {key_group(key) for key in keys} == {0}


def test_the_hash_never_changes_between_releases() -> None:
    (key,) = block_keys(token_array(range(16)), 16, b"tenant")
    assert key.hex() == "14082323766ed39525aa8ac206768445ca0fffc750fa0fd4426561cce017a70600000000"


@given(PROMPTS, PROMPTS, st.integers(1, 5))
def test_two_prompts_share_the_names_of_their_common_whole_blocks_and_no_other(
    one: list[int], other: list[int], block: int
) -> None:
    common = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    names, others = (block_keys(token_array(tokens), block) for tokens in (one, other))
    assert len(names) == len(one) // block
    shared = [a == b for a, b in zip(names, others, strict=False)]
    assert shared == [position < common // block for position in range(len(shared))]
    assert len(set(names) | set(others)) == len(names) + len(others) - common // block


def test_a_salt_changes_every_name() -> None:
    tokens = token_array(range(64))
    names = [set(block_keys(tokens, 16, salt)) for salt in (b"", b"a", b"b")]
    assert len(set.union(*names)) == 12


@pytest.mark.parametrize(
    "given_as",
    [
        [1, 2, 3],
        (1, 2, 3),
        range(1, 4),
        [[1, 2, 3]],
        torch.tensor([1, 2, 3]),
        torch.tensor([[1, 2, 3]], dtype=torch.int32),
        np.array([1, 2, 3], np.uint16),
    ],
    ids=str,
)
def test_tokens_may_come_as_a_list_a_tensor_or_an_array(given_as: object) -> None:
    assert token_array(given_as).tolist() == [1, 2, 3]  # type: ignore[arg-type]


def test_no_tokens_have_no_names() -> None:
    assert block_keys(token_array([]), 16) == []
    assert block_keys(token_array(torch.zeros((1, 0), dtype=torch.long)), 16) == []


@pytest.mark.parametrize(
    "wrong", [torch.zeros((2, 3), dtype=torch.long), [[1, 2], [3]], [1.0, 2.0], ["a"], torch.tensor(3)], ids=str
)
def test_what_is_not_one_sequence_of_whole_numbers_is_refused(wrong: object) -> None:
    with pytest.raises(UsageError, match="token ids are"):
        token_array(wrong)  # type: ignore[arg-type]

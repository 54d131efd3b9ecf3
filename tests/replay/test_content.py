"""Expected content: every wrong byte is found, and a block in the wrong place names the block it belongs to."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvtier.tools.replay.content import BlockContent, Pages, find_owners, mix
from kvtier.types.geometry import GroupLayout, TensorRef
from kvtier.types.keys import OffloadKey, make_key

SIZES = (40, 64, 33)
LAYOUT = GroupLayout(tuple(TensorRef(index, size) for index, size in enumerate(SIZES)))
KEYS = [make_key(bytes([i]) * 16, 0) for i in range(8)]
PAGES = Pages(KEYS[:5], np.array([6, 0, 3, 2, 5]))


def make(on_host: bool = True) -> tuple[list[torch.Tensor], BlockContent]:
    tensors = [torch.zeros((8, size), dtype=torch.int8) for size in SIZES]
    return tensors, BlockContent(LAYOUT, tensors, on_host)


@pytest.mark.parametrize("on_host", [True, False])
def test_what_was_written_is_right(on_host: bool) -> None:
    tensors, content = make(on_host)
    content.write(PAGES)
    assert content.check(PAGES) == []
    for tensor in tensors:
        for untouched in (1, 4, 7):
            assert not tensor[untouched].any()


def test_host_and_device_write_the_same_bytes() -> None:
    host, device = make(True), make(False)
    host[1].write(PAGES)
    device[1].write(PAGES)
    for left, right in zip(host[0], device[0], strict=True):
        assert torch.equal(left, right)


@given(st.data(), st.booleans())
def test_every_flipped_bit_is_found(data: st.DataObject, on_host: bool) -> None:
    tensors, content = make(on_host)
    content.write(PAGES)
    tensor = data.draw(st.integers(0, len(SIZES) - 1))
    position = data.draw(st.integers(0, len(PAGES.keys) - 1))
    byte = data.draw(st.integers(0, SIZES[tensor] - 1))
    bit = data.draw(st.integers(0, 7))
    tensors[tensor].view(torch.uint8)[PAGES.gpu_blocks[position], byte] ^= 1 << bit
    (wrong,) = content.check(PAGES)
    assert (wrong.key, wrong.tensor, wrong.first_byte, wrong.wrong_bytes) == (PAGES.keys[position], tensor, byte, 1)
    assert find_owners([wrong.origin], KEYS, len(SIZES)) == {wrong.origin: wrong.key}


@pytest.mark.parametrize("tensor", range(len(SIZES)))
def test_a_block_in_the_wrong_place_names_its_owner(tensor: int) -> None:
    tensors, content = make()
    content.write(PAGES)
    tensors[tensor][3] = tensors[tensor][5]
    (wrong,) = content.check(PAGES)
    assert wrong.key == KEYS[2]
    assert wrong.origin is not None
    assert find_owners([wrong.origin], KEYS, len(SIZES)) == {wrong.origin: KEYS[4]}


def test_bytes_of_nobody_have_no_owner() -> None:
    tensors, content = make()
    content.write(PAGES)
    tensors[0][0] = 0
    (wrong,) = content.check(PAGES)
    assert wrong.origin is None
    tensors[0][0] = torch.from_numpy(np.frombuffer(_foreign(), np.int8).copy())
    (wrong,) = content.check(PAGES)
    assert wrong.origin is not None
    assert find_owners([wrong.origin], KEYS, len(SIZES)) == {}


def _foreign() -> bytes:
    """The content of a key that is not among those asked."""
    tensors = [torch.zeros((8, size), dtype=torch.int8) for size in SIZES]
    stranger = OffloadKey(b"a key of another replay")
    BlockContent(LAYOUT, tensors).write(Pages([stranger], np.array([0])))
    return tensors[0][0].numpy().tobytes()


@given(st.lists(st.integers(0, (1 << 64) - 1), min_size=1, max_size=8, unique=True))
def test_different_words_are_mixed_to_different_words(words: list[int]) -> None:
    assert len(set(mix(np.array(words, np.uint64)).tolist())) == len(words)

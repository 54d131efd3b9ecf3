"""Opening a stack by its face: a path or a config, a layout or a namespace, tensors, a model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import kvtier
from kvtier.config import stack_parts

TEXT = "tiers: [{type: cpu, cpu_bytes_to_use: 1MiB}]"
LAYOUT = kvtier.KVLayout.of_pages(4096, block_size=16)


def tensors(count: int = 1) -> list[torch.Tensor]:
    return [torch.zeros((8, 4096), dtype=torch.uint8) for _ in range(count)]


def test_a_layout_of_pages_is_one_group_over_one_tensor_or_several():
    (group,) = LAYOUT.groups
    assert (group.page_bytes, group.block_size, len(group.refs)) == (4096, 16, 1)
    (group,) = kvtier.KVLayout.of_pages([4096, 1024], block_size=32, block_size_factor=2).groups
    assert [(ref.tensor, ref.page_size_bytes) for ref in group.refs] == [(0, 4096), (1, 1024)]


def test_a_hybrid_layout_takes_a_list_of_groups():
    window = kvtier.GroupLayout.of_pages(4096, first_tensor=1, kind=kvtier.GroupKind.SLIDING_WINDOW, window_tokens=128)
    layout = kvtier.KVLayout(groups=[kvtier.GroupLayout.of_pages(4096), window])
    assert layout == kvtier.KVLayout(layout.groups)
    assert hash(layout) == hash(kvtier.KVLayout(layout.groups))
    assert layout.groups[1].refs[0].tensor == 1


def test_keys_of_blocks_carry_their_group():
    keys = kvtier.block_keys([b"a", b"b"], group=2)
    assert keys == [b"a\0\0\0\2", b"b\0\0\0\2"]


def test_a_path_and_a_config_mean_the_same(tmp_path: Path):
    (tmp_path / "stack.yaml").write_text(TEXT)
    of_path = stack_parts(tmp_path / "stack.yaml", LAYOUT, tensors(), model="m")
    of_config = stack_parts(kvtier.parse_stack(TEXT), kvtier.Namespace(LAYOUT, model="m"), tensors())
    assert of_path.namespace == of_config.namespace
    assert [tier.options for tier in of_path.tiers] == [tier.options for tier in of_config.tiers]


def test_a_model_is_named_once():
    namespace = kvtier.Namespace(LAYOUT, model="m")
    with pytest.raises(kvtier.UsageError, match="not both"):
        kvtier.open_stack(kvtier.parse_stack(TEXT), namespace, tensors(), model="other")


def test_a_file_that_is_missing_is_a_config_error(tmp_path: Path):
    with pytest.raises(kvtier.ConfigError, match=r"no\.yaml"):
        kvtier.open_stack(tmp_path / "no.yaml", LAYOUT, tensors())


def test_an_engine_stack_opens_from_the_same_arguments():
    with kvtier.open_engine_stack(kvtier.parse_stack(TEXT), LAYOUT, tensors(), model="m") as stack:
        assert stack.geometry.row_bytes == 4096
    assert stack.close_report == kvtier.CloseReport(0, 0)

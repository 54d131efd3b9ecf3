"""Opening a stack by its face: a path or a config, a layout or a namespace, tensors, a model."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from support_stack import run_jobs

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


def test_an_engine_stack_opens_from_the_same_arguments(short_folder):
    config = kvtier.parse_stack(f"{{runtime_dir: {short_folder}, {TEXT}}}")
    with kvtier.open_engine_stack(config, LAYOUT, tensors(), model="m") as stack:
        assert type(stack) is kvtier.ProcessStack
        assert stack.geometry.row_bytes == 4096
    assert stack.close_report == kvtier.CloseReport(0, 0)


def test_tensors_of_another_device_are_refused_before_a_process_is_started():
    stack = kvtier.open_engine_stack(kvtier.parse_stack(TEXT), LAYOUT, [tensors()[0].to("meta")], model="m")
    with pytest.raises(kvtier.ConfigError, match="in host memory or on CUDA, not on meta"):
        stack.open()


def test_a_closed_private_process_has_left_the_disk_to_the_next(short_folder, tmp_path):
    """Whatever opens the root next need not wait, be it an asyncio program or a tool."""
    disk = f"{{type: fs, roots: [{tmp_path}], capacity: 16MiB, min_free_bytes: 0}}"
    config = kvtier.parse_stack(f"{{runtime_dir: {short_folder}, tiers: [{TEXT[8:-1]}, {disk}]}}")
    keys, pages = kvtier.block_keys([bytes([n]) * 16 for n in range(4)]), tensors()
    pages[0][:4] = torch.arange(4, dtype=torch.uint8).reshape(-1, 1) + 1

    async def load() -> bool:
        async with kvtier.open_stack(config, LAYOUT, pages, model="m") as stack:
            return (await stack.load(keys, gpu_blocks=range(4, 8))).ok

    for turn in range(3):
        if turn == 1:
            assert asyncio.run(load())
        else:
            with kvtier.open_engine_stack(config, LAYOUT, pages, model="m") as stack:
                begin, first = (stack.submit_load, 4) if turn else (stack.submit_store, 0)
                job = begin(keys, gpu_blocks=range(first, first + 4))
                assert all(result.ok for result in run_jobs(stack, job).values())
            assert stack.close_report == kvtier.CloseReport(0, 0)
        assert not turn or torch.equal(pages[0][:4], pages[0][4:])
        pages[0][4:] = 0

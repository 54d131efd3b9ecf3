"""A KV layout as people write it, in one line or in a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvtier.config.layout import DEFAULT_LAYOUT, read_layout
from kvtier.errors import ConfigError
from kvtier.types.geometry import GroupKind, KVLayout

HYBRID = "full:page=32KiB,block=16;sliding_window:page=16KiB,block=32,window=512"


def test_groups_are_read_from_one_line() -> None:
    full, window = read_layout(HYBRID).layout().groups
    assert (full.kind, full.page_bytes, full.block_size, full.window_tokens) == (GroupKind.FULL, 32 << 10, 16, 0)
    assert (window.kind, window.page_bytes) == (GroupKind.SLIDING_WINDOW, 16 << 10)
    assert (window.block_size, window.window_tokens) == (32, 512)


def test_spaces_and_a_last_semicolon_do_not_matter() -> None:
    spaced = " full : page = 32 KiB , block=16 ; sliding_window: page=16384, block=32, window=512 ; "
    assert read_layout(spaced) == read_layout(HYBRID)


def test_every_group_has_tensors_of_its_own() -> None:
    assert [group.refs[0].tensor for group in read_layout(HYBRID).layout().groups] == [0, 1]


def test_a_page_follows_from_the_shape_of_the_model() -> None:
    (group,) = read_layout("full:layers=32,kv_heads=8,head_dim=128,dtype=bfloat16,block=16").layout().groups
    assert group.page_bytes == 2 * 32 * 8 * 128 * 2 * 16
    (group,) = read_layout("full:layers=3,kv_heads=2,head_dim=5,dtype=fp8,block=7").layout().groups
    assert group.page_bytes == 2 * 3 * 2 * 5 * 1 * 7


def test_latents_are_kept_once_for_all_workers(tmp_path: Path) -> None:
    latent = "full:layers=61,latent_dim=576,dtype=bfloat16,block=64"
    layout = read_layout(latent).layout(8)
    assert layout.groups[0].page_bytes == 61 * 576 * 2 * 64
    assert (layout.world_size, layout.num_copies, layout.replicated) == (8, 1, True)
    assert not read_layout(f"{latent};full:page=1KiB,block=64").layout(8).replicated
    for said in (True, False):
        (tmp_path / "layout.json").write_text(json.dumps({"groups": [{"page": "1KiB"}], "replicated": said}))
        assert read_layout(str(tmp_path / "layout.json")).layout(2).replicated is said


@pytest.mark.parametrize(("world_size", "heads"), [(1, 8), (2, 4), (3, 3), (8, 1), (16, 1)])
def test_workers_share_the_heads_and_copy_the_last_one(world_size: int, heads: int) -> None:
    layout = read_layout("full:layers=1,kv_heads=8,head_dim=1,dtype=int8,block=1").layout(world_size)
    assert layout.groups[0].page_bytes == 2 * heads
    assert layout.world_size == world_size


def test_a_file_says_the_same_in_yaml_and_in_json(tmp_path: Path) -> None:
    groups = [{"page": "32KiB", "block": 16}, {"kind": "sliding_window", "page": 16384, "block": 32, "window": 512}]
    document = {"groups": groups, "world_size": 2, "block_size_factor": 4}
    (tmp_path / "layout.json").write_text(json.dumps(document))
    (tmp_path / "layout.yaml").write_text(
        "world_size: 2\nblock_size_factor: 4\ngroups:\n"
        "  - {page: 32KiB, block: 16}\n  - {kind: sliding_window, page: 16384, block: 32, window: 512}\n"
    )
    expected = KVLayout(read_layout(HYBRID).layout().groups, 2, 4)
    for name in ("layout.json", "layout.yaml"):
        assert read_layout(str(tmp_path / name)).layout() == expected
    assert read_layout(str(tmp_path / "layout.json")).layout(8, 1) == KVLayout(expected.groups, 8, 1)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("", "layout: is empty; write for example full:"),
        (" ; ", "layout: is empty"),
        ("full", "layout.groups[0]: '' is no key=value"),
        ("full:page", "layout.groups[0]: 'page' is no key=value"),
        ("full:page=1,page=2", "layout.groups[0]: page is given twice"),
        ("full:pag=1", "layout.groups[0].pag: unknown key; did you mean 'page'?"),
        ("full:page=10 bananas", "layout.groups[0].page: '10 bananas' is not a size"),
        ("full:page=1KiB;half:page=1KiB", "layout.groups[1].kind: 'half' is not known; write 'full'"),
        ("full:page=1KiB,block=0", "layout.groups[0].block: 0 is not accepted"),
        ("full:page=1KiB,block=x", "layout.groups[0].block: 'x' is not accepted"),
        ("full:block=16", "layout.groups[0]: give either page, or layers, kv_heads and head_dim, or layers"),
        ("full:page=1,layers=1", "layout.groups[0]: give page or the shape of the layers, not both"),
        ("full:page=1,latent_dim=1", "layout.groups[0]: give page or the shape of the layers, not both"),
        ("full:layers=1,latent_dim=1,head_dim=1", "layout.groups[0]: give latent_dim, or kv_heads and head_dim"),
        ("full:page=1,window=5", "layout.groups[0]: window goes with sliding_window groups"),
        ("sliding_window:page=1", "layout.groups[0]: window goes with sliding_window groups"),
        ("absent.yaml", "absent.yaml does not exist"),
    ],
)
def test_a_mistake_ends_in_one_line(spec: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_layout(spec)
    assert str(caught.value).startswith(expected)
    assert "\n" not in str(caught.value)


def test_the_default_layout_is_one() -> None:
    assert read_layout(DEFAULT_LAYOUT).layout().groups[0].page_bytes == 2 << 20


@pytest.mark.parametrize(
    ("spelled", "meant"),
    [("bf16", "bfloat16"), ("fp16", "float16"), ("fp32", "float32"), ("float8_e4m3fn", "fp8"), ("auto", "bfloat16")],
)
def test_the_usual_spellings_of_a_dtype_are_accepted(spelled: str, meant: str) -> None:
    shape = "full:layers=2,kv_heads=2,head_dim=8,block=16,dtype="
    assert read_layout(shape + spelled) == read_layout(shape + meant)


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"layout\.groups\[0\]\.dtype"):
        read_layout("full:layers=2,kv_heads=2,head_dim=8,dtype=float7")

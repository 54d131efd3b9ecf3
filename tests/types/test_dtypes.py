"""Spellings of element types."""

from __future__ import annotations

import pytest

from kvtier.config.layout import read_layout
from kvtier.errors import ConfigError
from kvtier.types.dtypes import canonical_dtype, dtype_bytes
from kvtier.types.geometry import GroupLayout, KVLayout, TensorRef
from kvtier.types.namespace import Namespace

SPELLINGS = {
    "bfloat16": ["bf16", "torch.bfloat16", "BFloat16"],
    "float16": ["fp16", "half", "torch.float16"],
    "float32": ["fp32", "float", "torch.float32"],
    "float8_e4m3fn": ["fp8", "fp8_e4m3", "torch.float8_e4m3fn"],
    "float8_e5m2": ["fp8_e5m2", "torch.float8_e5m2"],
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_every_spelling_is_the_same_type_in_layouts_and_namespaces(name):
    layout = KVLayout((GroupLayout((TensorRef(0, 4096),)),))
    shape = "full:layers=2,kv_heads=4,head_dim=64,block=16,dtype="
    for spelling in SPELLINGS[name]:
        assert canonical_dtype(spelling) == name
        assert read_layout(shape + spelling).layout() == read_layout(shape + name).layout()
        assert Namespace(layout, dtype=spelling).digest() == Namespace(layout, dtype=name).digest()


def test_types_of_one_size_are_told_apart():
    layout = KVLayout((GroupLayout((TensorRef(0, 4096),)),))
    assert len({Namespace(layout, dtype=name).digest() for name in SPELLINGS}) == len(SPELLINGS)


def test_auto_has_the_size_of_bfloat16():
    assert dtype_bytes("auto") == dtype_bytes("bfloat16") == 2
    read_layout("full:layers=2,kv_heads=4,head_dim=64,block=16,dtype=auto")


def test_an_unknown_type_is_refused_with_those_that_are_known():
    with pytest.raises(ConfigError, match=r"layout\.groups\[0\]\.dtype.*'float7'.*bf16"):
        read_layout("full:layers=2,kv_heads=4,head_dim=64,block=16,dtype=float7")

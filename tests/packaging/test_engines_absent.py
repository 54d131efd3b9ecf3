"""Without an engine, or beside another generation of it, its integration says what it needs."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types

import pytest

from kvtier.errors import ConfigError

without_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed here")
without_lmcache = pytest.mark.skipif(
    importlib.util.find_spec("lmcache") is not None, reason="LMCache is installed here"
)
without_sglang = pytest.mark.skipif(importlib.util.find_spec("sglang") is not None, reason="SGLang is installed here")


@without_sglang
def test_without_sglang_the_error_names_the_supported_release():
    with pytest.raises(ConfigError, match=r"needs SGLang 0\.5\.23; no SGLang is installed"):
        importlib.import_module("kvtier.engines.sglang")


@without_lmcache
def test_without_lmcache_the_error_names_the_supported_releases():
    with pytest.raises(ConfigError, match=r"needs LMCache 0\.5\.6 or 0\.5\.7; no LMCache is installed"):
        importlib.import_module("kvtier.engines.lmcache")


@without_vllm
def test_without_vllm_the_error_names_the_supported_generation():
    with pytest.raises(ConfigError, match=r"needs vLLM 0\.32 or 0\.33; no vLLM is installed"):
        importlib.import_module("kvtier.engines.vllm")


@without_vllm
def test_another_generation_is_refused_by_what_it_lacks(monkeypatch):
    class OffloadingManager:
        def lookup(self, keys): ...

    for name in ("vllm", "vllm.v1", "vllm.v1.kv_offload", "vllm.v1.kv_offload.tiering"):
        package = types.ModuleType(name)
        package.__path__ = []
        monkeypatch.setitem(sys.modules, name, package)
    base = types.ModuleType("vllm.v1.kv_offload.base")
    base.OffloadingManager = OffloadingManager
    monkeypatch.setitem(sys.modules, base.__name__, base)
    tiering = types.ModuleType("vllm.v1.kv_offload.tiering.base")
    monkeypatch.setitem(sys.modules, tiering.__name__, tiering)
    with pytest.raises(ConfigError, match=r"needs vLLM 0\.32.*OffloadingManager\.prepare_load.*SecondaryTierManager"):
        importlib.import_module("kvtier.engines.vllm")

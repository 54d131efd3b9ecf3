"""SGLang on a machine without a GPU. To be imported before anything of SGLang.

Two packages that SGLang imports need CUDA: torchvision and sgl_kernel. Here any module of theirs is an empty one, and
any name in it a class that does nothing. Of SGLang itself three things are replaced: host memory is not registered with
CUDA, no memory is kept free for the system, and torch copies pages where SGLang has kernels.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from support_freezing_disk import FROZEN_FILE, let_freeze

ABSENT = ("torchvision", "sgl_kernel")
POOLS = "sglang.srt.mem_cache.pool_host"


class _Nothing(type):
    """A class that takes any arguments, and has any attribute: None."""

    def __getattr__(cls, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return None


class _EmptyModule(ModuleType):
    __version__ = "0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found = _Nothing(name, (), {})
        setattr(self, name, found)
        return found


class _Absent(MetaPathFinder, Loader):
    """Finds every module of the packages that are absent."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in ABSENT else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _EmptyModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


class _Patched(MetaPathFinder):
    """Calls a function with a module of SGLang once that module has been executed."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        change = CHANGES.get(name)
        spec = PathFinder.find_spec(name, path) if change else None
        if spec is None or spec.loader is None or change is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            change(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _without_registration(module: Any) -> None:
    module._cuda_host_register = module._cuda_host_unregister = lambda *args, **kwargs: None


def _without_reserve(module: Any) -> None:
    module.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0


def _with_copies(module: Any) -> None:
    def layer_to_layer(src_layers: Any, dst_layers: Any, src_indices: Any, dst_indices: Any, page_size: int) -> None:
        for source, target in zip(src_layers, dst_layers, strict=True):
            target.index_copy_(0, dst_indices, source.index_select(0, src_indices))

    def layers_to_pages(src_ptrs: Any, dst_ptrs: Any, src_indices: Any, dst_indices: Any, page_size: int) -> None:
        pages = dst_indices.view(-1, page_size)[:, 0] // page_size
        layers = len(src_ptrs) // len(dst_ptrs)
        for number, source in enumerate(src_ptrs):
            target = dst_ptrs[number // layers]
            taken = source.index_select(0, src_indices)
            target[pages, number % layers] = taken.view(-1, *target.shape[2:])

    def pages_to_layer(
        src_ptrs: Any, dst_ptrs: Any, src_indices: Any, dst_indices: Any, layer_id: int, page_size: int
    ) -> None:
        pages = src_indices.view(-1, page_size)[:, 0] // page_size
        for source, target in zip(src_ptrs, dst_ptrs, strict=True):
            target.index_copy_(0, dst_indices, source[pages, layer_id].reshape(-1, *target.shape[1:]))

    module.transfer_kv_direct = layer_to_layer
    module.transfer_kv_all_layer_direct_lf_pf = layers_to_pages
    module.transfer_kv_per_layer_direct_pf_lf = pages_to_layer


CHANGES: dict[str, Callable[[Any], None]] = {
    f"{POOLS}.common": _without_registration,
    f"{POOLS}.base": _without_reserve,
    f"{POOLS}.mha": _with_copies,
    f"{POOLS}.mla": _with_copies,
}
if FROZEN_FILE in os.environ:
    CHANGES["kvtier_fs.local.tier"] = lambda module: let_freeze(module.FSBackend)
sys.meta_path[:0] = [_Absent(), _Patched()]

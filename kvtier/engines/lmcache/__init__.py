"""LMCache's multi-process server over kvtier: an L2 adapter of type `plugin`, `KVTierL2Adapter`.

`module_path` of LMCache's configuration is this package, `class_name` is `KVTierL2Adapter`.
"""

from kvtier.engines.lmcache.compat import RELEASE

RELEASE.require_supported()

from kvtier.engines.lmcache.l2_adapter import KVTierL2Adapter  # noqa: E402  # only with a LMCache that has its base

__all__ = ["KVTierL2Adapter"]

"""A tier below LMCache's multi-process server: `KVTierL2Adapter`, an L2 adapter (`plugin`) that its threads call.

`module_path` of LMCache's configuration is this package, `class_name` is that class.
"""

from kvtier.engines.lmcache.compat import RELEASE

RELEASE.require_supported()

from kvtier.engines.lmcache.l2_adapter import KVTierL2Adapter  # noqa: E402  # only with a LMCache that has its base

__all__ = ["KVTierL2Adapter"]

"""A tier below SGLang's HiCache: `KVTierHiCache`, which its threads call; `--hicache-storage-backend dynamic`.

`module_path` of SGLang's configuration is this package, `class_name` is `KVTierHiCache`.
"""

from kvtier.engines.sglang.compat import RELEASE

RELEASE.require_supported()

from kvtier.engines.sglang.hicache import KVTierHiCache  # noqa: E402  # only with an SGLang that has its base

__all__ = ["KVTierHiCache"]

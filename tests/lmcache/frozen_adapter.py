"""`module_path` for a server under test: kvtier's adapter on disks that do not answer while a file is there."""

from support_freezing_disk import let_freeze

from kvtier.engines.lmcache import KVTierL2Adapter
from kvtier_fs.local.tier import FSBackend

__all__ = ["KVTierL2Adapter"]
let_freeze(FSBackend)

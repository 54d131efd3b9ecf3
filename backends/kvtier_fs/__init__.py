"""The filesystem tiers of kvtier: `fs` on local disks, found again after a restart; `shared_fs` for many hosts."""

from kvtier_fs.options import FSOptions, SharedFSOptions
from kvtier_fs.shared_tier import SharedFSBackend
from kvtier_fs.tier import FSBackend

__all__ = ["FSBackend", "FSOptions", "SharedFSBackend", "SharedFSOptions"]

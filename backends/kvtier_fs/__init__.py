"""The filesystem tier of kvtier: blocks in slots of large files on local disks, found again after a restart."""

from kvtier_fs.backend import FSBackend
from kvtier_fs.options import FSOptions

__all__ = ["FSBackend", "FSOptions"]

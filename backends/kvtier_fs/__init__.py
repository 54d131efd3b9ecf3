"""The filesystem tiers: `fs` on local disks, `shared_fs` for many hosts; touches its roots and the rows of its jobs."""

from importlib import import_module
from typing import TYPE_CHECKING

from kvtier_fs.options import FSOptions, SharedFSOptions

if TYPE_CHECKING:
    from kvtier_fs.local.tier import FSBackend
    from kvtier_fs.shared.tier import SharedFSBackend

__all__ = ["FSBackend", "FSOptions", "SharedFSBackend", "SharedFSOptions"]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """A tier, loaded at its first use: a stack with one does not load the other."""
        modules = {"FSBackend": "kvtier_fs.local.tier", "SharedFSBackend": "kvtier_fs.shared.tier"}
        if name not in modules:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(modules[name]), name)

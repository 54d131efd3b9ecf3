"""The exception tree. Exceptions are for user errors and defects; bad luck is an outcome (`kvtier.types.jobs`).

KVTierError
+-- ConfigError             a stack file or an option is wrong; carries the path of the key
+-- GeometryError           a layout or a budget that cannot work; names the bytes needed
+-- ResourceError           the machine lacks what was asked for
|   +-- SharedMemoryError   too little shared memory, before any touch; names need and have
|   +-- RegionError         a shared region that must not be joined (stale, foreign, other geometry)
|   +-- RootError           a filesystem root that cannot be used (missing, permission, foreign, network)
|       +-- RootBusyError   another live process owns the root; names the owner
+-- UsageError              a call the contract does not allow (closed stack, unknown group, use after fork)
+-- IntegrityError          our own bug: an invariant of the state machine does not hold
"""


class KVTierError(Exception):
    """Base of every exception kvtier raises on purpose."""


class ConfigError(KVTierError):
    """A stack file or an option is wrong. `path` is the key as `tiers[1].cpu_bytes_to_use`; empty: the whole file."""

    def __init__(self, reason: str, path: str = "") -> None:
        super().__init__(f"{path}: {reason}" if path else reason)
        self.path = path
        self.reason = reason

    def below(self, at: str) -> "ConfigError":
        """The same error under the path of what the key is in."""
        return ConfigError(self.reason, f"{at}.{self.path}" if self.path else at)


class GeometryError(KVTierError):
    """A KV layout or a budget that cannot work; the message names the bytes needed."""


class ResourceError(KVTierError):
    """The machine lacks what was asked for."""


class SharedMemoryError(ResourceError):
    """Too little shared memory. Raised before any page is touched, so never a later SIGBUS."""

    def __init__(self, need_bytes: int, have_bytes: int, where: str) -> None:
        super().__init__(
            f"{where} offers {have_bytes} bytes but the region needs {need_bytes}: "
            f"lower cpu_bytes_to_use or raise the limit"
        )
        self.need_bytes = need_bytes
        self.have_bytes = have_bytes
        self.where = where


class RegionError(ResourceError):
    """A shared region that must not be joined: stale, foreign, of another geometry, or never made ready."""


class RootError(ResourceError):
    """A filesystem root that cannot be used. The message says what to do."""

    def __init__(self, root: str, reason: str) -> None:
        super().__init__(f"{root}: {reason}")
        self.root = root
        self.reason = reason


class RootBusyError(RootError):
    """Another live process owns the root."""

    def __init__(self, root: str, owner: str) -> None:
        ways = "give this process a root of its own, stop the other one, or serve both by one `kvtier serve`"
        super().__init__(root, f"in use by {owner}; {ways}")
        self.owner = owner


class RootDamagedError(RootError):
    """A root holds blocks, and nothing says any more which of them count. It is left as it is."""


class UsageError(KVTierError):
    """A call the contract does not allow, such as using a closed stack."""


class IntegrityError(KVTierError):
    """A defect of kvtier itself: an invariant does not hold. Never raised for bad luck."""

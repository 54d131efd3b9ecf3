"""Looking at what a backend keeps on disk without opening it as a tier: what `kvtier fsck`, `ls`, `du`, `gc` rest on.

A backend class that offers `Inspects` is found through the registry like any other; the core knows none by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, Protocol, runtime_checkable

from kvtier.errors import ConfigError, RootError
from kvtier.registry import Backends


class Access(StrEnum):
    """What a tool is about to do, and so whom it must keep out.

    LOOK: read beside a live owner. CHECK: read, while nobody may own the store. CHANGE: own the store. A store that
    several processes share is read and changed beside them, under the locks that they take themselves.
    """

    LOOK = "look"
    CHECK = "check"
    CHANGE = "change"


class BlockState(StrEnum):
    """CURRENT counts when the store is opened again. Nothing else can be loaded any more.

    OLD: of an epoch that a reset ended. ORPHANED: of an earlier cut of its region, or where nobody looks for it.
    FOREIGN: another store's.
    """

    CURRENT = "current"
    OLD = "old"
    ORPHANED = "orphaned"
    FOREIGN = "foreign"


class FindingKind(StrEnum):
    """What a check can find: first the damage, then what is there without harm."""

    CORRUPT = "corrupt"
    TRUNCATED = "truncated"
    BAD_SUPERBLOCK = "bad_superblock"
    BAD_SNAPSHOT = "bad_snapshot"
    BAD_EPOCH = "bad_epoch"
    BAD_ACCOUNT = "bad_account"
    BAD_LEASE = "bad_lease"
    STALE_SUPERBLOCK = "stale_superblock"
    STALE_ACCOUNT = "stale_account"
    ORPHANED = "orphaned"
    FOREIGN = "foreign"
    OLD = "old"
    UNKNOWN_FILE = "unknown_file"
    UNCHECKED = "unchecked"

    @property
    def is_damage(self) -> bool:
        """True for what is not as it was written; false for leftovers that nothing will ever load."""
        return self in _DAMAGE


_DAMAGE = (
    FindingKind.CORRUPT,
    FindingKind.TRUNCATED,
    FindingKind.BAD_SUPERBLOCK,
    FindingKind.BAD_SNAPSHOT,
    FindingKind.BAD_EPOCH,
    FindingKind.BAD_ACCOUNT,
    FindingKind.BAD_LEASE,
)


class Finding(NamedTuple):
    """One thing found: what it is, which field or fact says so, where it is, and whether it was put right."""

    kind: FindingKind
    reason: str
    where: str
    repaired: bool = False


class StoredBlock(NamedTuple):
    """One block on disk, as its header tells; its payload was not read. `key` is the full offload key.

    `region` is the part of the store it lies in, `slot` its number there. `stored_bytes` counts everything it takes up,
    `payload_bytes` the block alone. Of two copies of a key in one namespace the larger `generation` is the newer.
    `stored_at` and `used_at` (seconds since 1970) and `hits` are None where the store does not keep them.
    """

    state: BlockState
    namespace: bytes
    group: int
    key: bytes
    region: int
    slot: int
    generation: int
    payload_bytes: int
    stored_bytes: int
    stored_at: float | None = None
    hits: int | None = None
    used_at: float | None = None


class Listed(NamedTuple):
    """A step of going through a store: how many slots were looked at, and the blocks found in them."""

    slots: int
    blocks: Sequence[StoredBlock]


class Checked(NamedTuple):
    """A step of a check: slots looked at, those that hold no block, whole blocks and their payload bytes, findings."""

    slots: int = 0
    empty: int = 0
    whole: int = 0
    payload_bytes: int = 0
    findings: Sequence[Finding] = ()


@dataclass(frozen=True, slots=True)
class StoredNamespace:
    """A namespace the store knows. `session`, `opened_at` (seconds since 1970), `model`, `tag`: None where it cannot
    tell."""

    digest: bytes
    epoch: int
    session: int | None
    opened_at: float | None = None
    model: str | None = None
    tag: str | None = None


@dataclass(frozen=True, slots=True)
class StoreAbout:
    """One store as a whole.

    `slots` is how many slots going through it or checking it will look at; where others store meanwhile, about.
    `region_bytes` 0: parts of no fixed size. `session` counts how often it was opened; `clean` says that the last
    session closed in order; None where nobody counts. `owner` is who has it open now, in words; empty: nobody.
    """

    root: str
    layout: str
    identity: str
    slots: int
    regions: int
    region_bytes: int
    session: int | None
    clean: bool | None
    owner: str
    namespaces: tuple[StoredNamespace, ...]
    notes: tuple[str, ...] = ()


class Inspection(Protocol):
    """A store under inspection. Every call blocks; what is iterated is read as the iteration goes on.

    Reading raises RootError for what keeps all of it from being read; a single place that cannot be read is a finding.
    """

    @property
    def about(self) -> StoreAbout: ...

    def blocks(self) -> Iterator[Listed]:
        """Every block that has a whole header, in the order of their places. Payloads are not read."""

    def check(self, repair: bool) -> Iterator[Checked]:
        """Verify everything, payloads too. Changes nothing, unless told to repair (then CHANGE access is needed).

        Repairing makes damaged blocks empty and restores the store's own records from their whole copies; what was
        done is durable when the iteration ends.
        """

    def drop(self, chosen: Callable[[StoredBlock], bool]) -> Iterator[Listed]:
        """Remove the blocks that are chosen, yielding them; needs CHANGE access. Durable when the iteration ends."""

    def close(self) -> None:
        """Let go of the store. Idempotent."""


@runtime_checkable
class Inspects(Protocol):
    """A backend class whose stores can be looked at, checked and pruned without opening them as a tier."""

    @classmethod
    def inspect(cls, root: str, access: Access) -> Inspection | None:
        """The store in a folder (an absolute path); None if the folder holds none of this backend's.

        Raises RootBusyError, naming the owner, if a live process has it for itself (unless access is LOOK), and
        RootError for a place that cannot be looked at. Lets go of everything then.
        """


def find_store(root: str, access: Access, backends: Backends) -> Inspection:
    """The store in a folder, of the first backend (by name) that recognises it.

    Raises RootError if none does, or what kept the backends from looking.
    """
    asked: list[str] = []
    broken: list[str] = []
    problems: list[RootError] = []
    for name in backends.names:
        try:
            backend = backends.get(name)
        except ConfigError:
            broken.append(name)  # no reason not to look with the others
            continue
        if not isinstance(backend, Inspects):
            continue
        asked.append(name)
        try:
            store = backend.inspect(root, access)
        except RootError as error:
            problems.append(error)
            continue
        if store is not None:
            return store
    if problems:
        raise problems[0]
    unasked = f"; cannot be loaded: {', '.join(broken)}" if broken else ""
    raise RootError(
        root, f"holds no store of blocks that a backend knows (asked: {', '.join(asked) or 'none'}{unasked})"
    )

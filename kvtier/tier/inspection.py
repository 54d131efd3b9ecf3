"""Reading what a backend keeps without opening it as a tier: for `kvtier fsck`, `ls`, `du` and `gc`.

A backend offers an inspector, an object that implements `Inspects` for stores in a folder or `InspectsServers` for
stores on a server. It is an entry point of the group `kvtier.inspectors`, named as the tier's type, so that no tier
that serves imports it. It may be the backend's own class.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple, Protocol, runtime_checkable

from kvtier.errors import ConfigError, RootError
from kvtier.options import TierOptions
from kvtier.tier.registry import Installed

_TEXT_MAX = 64


class Access(StrEnum):
    """The purpose of a tool, which decides what it locks.

    READ: read beside a live owner. CHECK: read, and keep every owner out meanwhile. CHANGE: own the store. A store that
    several processes share is read and changed beside them, under the locks that they take themselves.
    """

    READ = "read"
    CHECK = "check"
    CHANGE = "change"


class BlockState(StrEnum):
    """State of a stored block, by whether it can still be loaded: CURRENT can, after the store is opened again; no
    other can.

    OLD: of an epoch that a reset ended. ORPHANED: of an earlier format of its region, or in a place that no lookup
    leads to. FOREIGN: of another store.
    """

    CURRENT = "current"
    OLD = "old"
    ORPHANED = "orphaned"
    FOREIGN = "foreign"


class FindingKind(StrEnum):
    """Kinds of findings of a check: first the damage, then what is there without harm."""

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
        return self in (FindingKind.CORRUPT, FindingKind.TRUNCATED) or self.startswith("bad_")


class Finding(NamedTuple):
    """A finding of a check: what it is, which field or fact shows it, where it is, and whether it was repaired."""

    kind: FindingKind
    reason: str
    where: str
    repaired: bool = False


def read_manifest(text: str | bytes) -> tuple[str | None, str | None]:
    """Model and tag of a namespace's manifest, which is for people: None for what is no manifest, never an error."""
    try:
        fields = json.loads(text)
        return str(fields["model"])[:_TEXT_MAX], str(fields["tag"])[:_TEXT_MAX]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None, None


class StoredBlock(NamedTuple):
    """A block of a store, as its header or its name says; its payload was not read.

    `key` is the full offload key, or the digest that stands for it where names are all that is read. `region` is the
    part of the store it lies in, `slot` its number there. `stored_bytes` counts everything it takes up,
    `payload_bytes` the block alone. Of two copies of a key in one namespace the larger `generation` is the newer.
    `stored_at` and `used_at` (seconds since 1970), `hits`, `group` and `epoch` are None where the store does not say.
    """

    state: BlockState
    namespace: bytes
    group: int | None
    key: bytes
    region: int
    slot: int
    generation: int
    payload_bytes: int
    stored_bytes: int
    stored_at: float | None = None
    hits: int | None = None
    used_at: float | None = None
    epoch: int | None = None


class ListStep(NamedTuple):
    """A step of listing a store: how many slots were read, and the blocks found in them."""

    slots: int
    blocks: Sequence[StoredBlock]


class CheckStep(NamedTuple):
    """A step of a check: slots read, those that hold no block, whole blocks and their payload bytes, findings."""

    slots: int = 0
    empty: int = 0
    whole: int = 0
    payload_bytes: int = 0
    findings: Sequence[Finding] = ()


@dataclass(frozen=True, slots=True)
class StoredNamespace:
    """A namespace that has blocks in the store.

    `session`, `opened_at` (seconds since 1970), `model` and `tag` are None where the store does not record them.
    """

    digest: bytes
    epoch: int
    session: int | None
    opened_at: float | None = None
    model: str | None = None
    tag: str | None = None


@dataclass(frozen=True, slots=True)
class StoreAbout:
    """A store as a whole.

    `slots` is how many slots listing or checking it will read, an estimate where others store meanwhile; None: unknown.
    `parts` is what its regions are called. `region_bytes` 0: parts of no fixed size. `session` counts how often it was
    opened, and `clean` says that the last session closed in order; both are None where the store does not record them.
    `owner` describes the process that has it open now; empty: none.
    """

    root: str
    layout: str
    identity: str
    slots: int | None
    regions: int
    region_bytes: int = 0
    session: int | None = None
    clean: bool | None = None
    owner: str = ""
    namespaces: tuple[StoredNamespace, ...] = ()
    notes: tuple[str, ...] = ()
    parts: str = "regions"


class Inspection(Protocol):
    """A store under inspection. Every call blocks; iterators read as they are advanced.

    Reading raises RootError if nothing of the store can be read; a single place that cannot be read is a finding.
    """

    @property
    def about(self) -> StoreAbout:
        """The store as a whole."""

    def blocks(self) -> Iterator[ListStep]:
        """Every block with a whole header, in the order of their places. Payloads are not read."""

    def check(self, repair: bool) -> Iterator[CheckStep]:
        """Verify everything, payloads too. Changes nothing without `repair`, which needs CHANGE access.

        A repair empties damaged slots and restores the store's own records from their whole copies. It is durable when
        the iteration ends.
        """

    def drop(self, chosen: Callable[[StoredBlock], bool]) -> Iterator[ListStep]:
        """Remove the blocks that `chosen` accepts and yield them. Needs CHANGE access. Durable when iteration ends."""

    def close(self) -> None:
        """Release the store. Idempotent."""


@runtime_checkable
class Inspects(Protocol):
    """An inspector of stores in folders."""

    def inspect(self, root: str, access: Access) -> Inspection | None:
        """The store in a folder (an absolute path); None if the folder holds none of this type.

        Raises RootBusyError, naming the owner, if a live process owns it (unless access is READ), and RootError for a
        place that cannot be read. Keeps nothing open then.
        """


@runtime_checkable
class InspectsServers(Protocol):
    """An inspector of stores on a server, at an address such as `valkey://cache-0:6379/team-a`."""

    def address_options(self, address: str) -> dict[str, Any] | None:
        """The options that a stack file states for the tier at an address; None for an address of another kind.

        Raises ConfigError for one that holds a user or a password: addresses stand on command lines.
        """

    def inspect_server(self, options: TierOptions, access: Access) -> Inspection:
        """The store that a tier of these options uses. Other processes use it at the same time.

        Raises ConfigError with the option to correct, or RootError. Keeps nothing open then.
        """


class Inspectors(Installed[Inspects | InspectsServers]):
    """The inspectors of one environment by the type name of the tier that keeps what they read."""

    GROUP = "kvtier.inspectors"
    KIND = "inspector"

    @staticmethod
    def _contract_fault(loaded: object) -> str:
        return "" if isinstance(loaded, Inspects | InspectsServers) else "inspects neither folders nor servers"


def find_store(root: str, access: Access, inspectors: Inspectors) -> Inspection:
    """The store in a folder, of the first inspector (by name) that recognises it.

    Raises RootError if none does, or the first error that kept one from reading it.
    """
    tried: list[str] = []
    broken: list[str] = []
    problems: list[RootError] = []
    for name in inspectors.names:
        try:
            inspector = inspectors.get(name)
        except ConfigError:
            broken.append(name)  # the others can still read it
            continue
        if not isinstance(inspector, Inspects):
            continue
        tried.append(name)
        try:
            store = inspector.inspect(root, access)
        except RootError as error:
            problems.append(error)
            continue
        if store is not None:
            return store
    if problems:
        raise problems[0]
    rest = f"; cannot be loaded: {', '.join(broken)}" if broken else ""
    raise RootError(root, f"holds no store of blocks of a known type (tried: {', '.join(tried) or 'none'}{rest})")


def find_server(address: str, inspectors: Inspectors) -> tuple[str, dict[str, Any]]:
    """The type of the tier at an address such as `valkey://cache-0:6379/team-a`, and its options.

    Raises RootError if no inspector reads such addresses, ConfigError for an address with a user or a password.
    """
    scheme, broken = address.partition("://")[0], list[str]()
    for name in sorted(inspectors.names, key=lambda name: name != scheme):  # the likely one first: each is imported
        try:
            inspector = inspectors.get(name)
        except ConfigError:
            broken.append(name)
            continue
        if isinstance(inspector, InspectsServers) and (options := inspector.address_options(address)) is not None:
            return name, options
    rest = f" (cannot be loaded: {', '.join(broken)})" if broken else ""
    raise RootError(f"{scheme}://", f"no backend reads such an address{rest}")

"""What outlives a host: servers, a shared folder and the hosts' own disks, in memory.

Over them run the tiers' own `SharedEpoch`, and the superblock's own table, encoded and decoded each time.
"""

from __future__ import annotations

import copy
import errno
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from types import SimpleNamespace
from typing import Any, ClassVar, Literal, TypeVar

from kvtier.options import SharedTierOptions, TierOptions
from kvtier.testing.memory import MemoryStorage, MemoryTier, SharedMemoryTier
from kvtier.tier.contract import LookupResult, Opened, TierContext
from kvtier.types.jobs import MISSING, STORED, BlockOutcome, DropReason, JobKind, JobResult, TransferJob, dropped
from kvtier.types.keys import OffloadKey
from kvtier_fs.format.superblock import MAX_NAMESPACES, Superblock, decode_superblock, encode_superblock
from kvtier_fs.format.tree_records import decode_epoch, encode_epoch
from kvtier_fs.local.opening import first_epoch
from kvtier_fs.shared.tier import FolderEpoch
from kvtier_remote.backend import RemoteBackend
from kvtier_remote.options import RemoteOptions
from kvtier_remote.transport import Marker, NameFormat, TransportInfo, Value, ValueRef, Verify
from kvtier_remote.valkey.transport import marker_of

T = TypeVar("T")
DOWN = OSError(errno.ETIMEDOUT, "the server does not answer")


@dataclass(slots=True, eq=False)
class Server:
    """A server: the text of its markers, as Valkey keeps it, and values. `down`: it does not answer."""

    markers: dict[str, bytes] = field(default_factory=dict)
    values: dict[str, bytes] = field(default_factory=dict)
    down: bool = False

    def dump(self) -> Callable[[], None]:
        """Keep what it has; what is returned brings that back."""
        markers, values = dict(self.markers), dict(self.values)

        def restore() -> None:
            self.markers, self.values = dict(markers), dict(values)

        return restore

    def epoch(self) -> int | None:
        """What the one marker states."""
        held = next((marker_of(text) for text in self.markers.values()), None)
        return None if held is None else held.epoch


class ServerTransport:
    """A connection to a server: calls happen at once."""

    name_format: ClassVar[NameFormat] = NameFormat()
    batch_blocks: ClassVar[int] = 64
    batch_bytes: ClassVar[int] = 1 << 20
    concurrency: ClassVar[int] = 4
    hedges: ClassVar[bool] = False

    def __init__(self, server: Server) -> None:
        self._server = server

    def _reach(self) -> Server:
        if self._server.down:
            raise DOWN
        return self._server

    async def open(self) -> TransportInfo:
        return TransportInfo(1 << 30)

    async def close(self, timeout_seconds: float) -> int:
        return 0

    async def present(self, places: Sequence[ValueRef]) -> list[bool]:
        return [place.name in self._reach().values for place in places]

    async def get(self, values: Sequence[Value], verify: Verify) -> list[BlockOutcome]:
        return [self._get(i, value, verify) for i, value in enumerate(values)]

    def _get(self, position: int, value: Value, verify: Verify) -> BlockOutcome:
        held = None if self._server.down else self._server.values.get(value.place.name)
        if held is None:
            return MISSING
        value.payload[:] = held[value.place.header_bytes :]
        return verify(position, memoryview(held)[: value.place.header_bytes])

    async def put(self, values: Sequence[Value]) -> list[BlockOutcome]:
        if self._server.down:
            return [dropped(DropReason.TIER_DOWN)] * len(values)
        self._server.values.update({value.place.name: value.header + bytes(value.payload) for value in values})
        return [STORED] * len(values)

    async def remove(self, places: Sequence[ValueRef]) -> None:
        for place in places:
            self._reach().values.pop(place.name, None)

    async def read_marker(self, name: str) -> Marker | None:
        return marker_of(self._reach().markers.get(name, b""))

    async def swap_marker(self, name: str, held: Marker | None, marker: Marker) -> Marker | None:
        if await self.read_marker(name) == held:
            self._server.markers[name] = text_of(marker)
        return await self.read_marker(name)


def text_of(marker: Marker) -> bytes:
    """A marker as Valkey keeps it."""
    return f"{marker.incarnation.hex()} {marker.epoch}".encode()


class ServerOptions(RemoteOptions):
    """Options of the tier on a simulated server."""

    type: Literal["server"] = "server"


class ServerTier(RemoteBackend):
    """The tier of every remote engine, over a simulated server."""

    Options: ClassVar[type[TierOptions]] = ServerOptions

    def __init__(self, server: Server, number: int) -> None:
        super().__init__(ServerOptions(name=f"server{number}", hit_hint_seconds=1e-3, miss_hint_seconds=1e-3))
        self._server = server

    def _make_transport(self) -> Any:
        return ServerTransport(self._server)


class Folder:
    """The folder of a shared root: files of epochs in their own format, and blocks."""

    def __init__(self) -> None:
        self.storage = MemoryStorage()
        self.files: dict[bytes, bytes] = {}

    def dump(self) -> Callable[[], None]:
        """As that of a server."""
        files, blocks = dict(self.files), dict(self.storage.blocks)

        def restore() -> None:
            self.files, self.storage.blocks = dict(files), copy.copy(blocks)

        return restore

    def epoch(self, namespace: bytes) -> int | None:
        return decode_epoch(self.files.get(namespace, b""), namespace)

    def has_lost_epoch(self, namespace: bytes) -> bool:
        return namespace in self.files and self.epoch(namespace) is None

    def durable_epoch(self, namespace: bytes) -> int | None:
        return self.epoch(namespace)

    def swap_epoch(self, namespace: bytes, held: int | None, epoch: int, temporary: str) -> int | None:
        if self.epoch(namespace) == held:
            self.files[namespace] = encode_epoch(namespace, epoch)
        return self.epoch(namespace)


class _FolderRoot:
    """What `FolderEpoch` needs of a shared root."""

    def __init__(self, folder: Folder) -> None:
        self.folder = folder
        self.path = "/shared"
        self.counters: Counter[str] = Counter()
        self.hooks = SimpleNamespace(lock_seconds=1.0)

    async def call(self, fn: Callable[..., T], *args: Any) -> T:
        return fn(*args)

    async def with_room(self, attempt: Callable[[], Any]) -> Any:
        return await attempt()

    def temporary(self) -> str:
        return "new"


class FolderOptions(SharedTierOptions):
    """Options of the tier in a simulated folder."""

    type: Literal["folder"] = "folder"
    capacity: int = 1 << 20
    job_timeout_seconds: float = 5.0


class FolderTier(SharedMemoryTier):
    """One file a block, as `shared_fs` has them: a job moves blocks of the epoch alone that the folder states."""

    Options: ClassVar[type[TierOptions]] = FolderOptions

    def __init__(self, folder: Folder) -> None:
        super().__init__(FolderOptions(hit_hint_seconds=1e-3, miss_hint_seconds=1e-3), folder.storage)  # type: ignore[arg-type]
        self._root: Any = _FolderRoot(folder)
        self._epoch: FolderEpoch

    async def open(self, context: TierContext) -> Opened:
        opened = await super().open(context)
        self._epoch = FolderEpoch(self._root, context.namespace.digest())
        is_new = await self._epoch.begin(context.new_epoch or 0)
        return replace(opened, epoch=self._epoch.now, is_new_epoch=is_new)

    def leave_epoch(self) -> None:
        self._epoch.leave()

    async def state_epoch(self, epoch: int) -> int:
        return await self._epoch.state(epoch)

    async def reset(self, epoch: int) -> None:
        await self._epoch.reset(epoch)

    async def lookup(self, keys: Sequence[OffloadKey]) -> Sequence[LookupResult]:
        digest, epoch = self._opened().namespace.digest(), self._epoch.now
        if self._root.folder.epoch(digest) != epoch:
            return [LookupResult.MISS] * len(keys)
        held = [(digest, epoch, bytes(key)) in self.storage.blocks for key in keys]
        return [LookupResult.HIT if hit else LookupResult.MISS for hit in held]

    async def _run(self, job: TransferJob, kind: JobKind) -> JobResult:
        stated = await self._epoch.read_epoch(job.epoch, kind is JobKind.STORE)
        if stated != job.epoch:
            return JobResult.uniform(job, dropped(DropReason.RESET) if kind is JobKind.STORE else MISSING)
        return await super()._run(job, kind)


class Disk:
    """A host's own disk: the superblock as bytes, and the blocks in its slots. `destroyed`: it was made anew."""

    def __init__(self) -> None:
        self.storage = MemoryStorage()
        self.page = encode_superblock(Superblock(b"r" * 16, 8192, 4, 4096, 4096))
        self.destroyed = False

    def superblock(self) -> Superblock:
        """What a session finds. A page that its own decoder refuses loses all namespaces."""
        found = decode_superblock(self.page)
        if found is None:
            self.destroyed = True
            self.storage = MemoryStorage()
            return Superblock(b"r" * 16, 8192, 4, 4096, 4096)
        return found

    def write(self, block: Superblock) -> None:
        """As `Root` writes it."""
        if not block.possible:
            raise OSError(errno.EOVERFLOW, "beyond what a superblock can state")
        self.page = encode_superblock(replace(block, sequence=block.sequence + 1))

    def begin(self, namespace: bytes, new_epoch: int | None) -> int:
        """A session of a namespace, as `open` and `begin_session` begin it."""
        block = self.superblock()
        epoch = first_epoch([block], namespace, new_epoch)
        block = replace(block, session=block.session + 1).with_epoch(namespace, epoch)
        self.write(block)
        return block.epoch(namespace)

    def forget(self, rng: Random) -> None:
        """So many other namespaces were served from this disk that the table has forgotten all before them."""
        block = self.superblock()
        for _ in range(MAX_NAMESPACES + 1):
            namespace = rng.randbytes(16)
            epoch = first_epoch([block], namespace, None)
            block = replace(block, session=block.session + 1).with_epoch(namespace, epoch)
            if rng.random() < 0.1:
                block = block.with_epoch(namespace, epoch + 1)
        self.write(block)


class DiskTier(MemoryTier):
    """The tier `fs`, over the superblock of a simulated disk."""

    def __init__(self, options: TierOptions, disk: Disk) -> None:
        super().__init__(options, disk.storage)
        self._disk = disk

    async def open(self, context: TierContext) -> Opened:
        namespace = context.namespace.digest()
        epoch = self._disk.begin(namespace, context.new_epoch)
        self.storage = self._disk.storage
        self.storage.epochs[namespace] = epoch
        return await super().open(context)

    async def reset(self, epoch: int) -> None:
        namespace = self._opened().namespace.digest()
        self._disk.write(self._disk.superblock().with_epoch(namespace, epoch))
        self.storage.epochs[namespace] = self._disk.superblock().epoch(namespace)

"""A store in a folder under inspection, whatever its layout: how it is opened, and read by a few threads."""

import errno
import os
import re
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import Generic, NamedTuple, Protocol, Self, TypeVar

import xxhash

from kvtier.errors import RootError
from kvtier.tier.block_age import stored_at
from kvtier.tier.block_envelope import Mismatch, SlotHeader, first_difference, key_fault
from kvtier.tier.inspection import (
    Access,
    BlockState,
    CheckStep,
    Finding,
    StoreAbout,
    StoredBlock,
    StoredNamespace,
    read_manifest,
)
from kvtier.tier.store_inspection import CheckedPage, Page, StoreInspection
from kvtier_fs.format.superblock import FORMAT_VERSION, decode_superblock, foreign_version
from kvtier_fs.format.tree_records import FILES_VERSION, decode_tree
from kvtier_fs.roots.folder import SUPERBLOCK_NAME, GuardedFolder, manifest_name, plain_file
from kvtier_fs.roots.private_tree import names_in
from kvtier_fs.shared.folder import EPOCHS_NAME, read_small
from kvtier_fs.shared.paths import BUCKET_NAME

SHORT = "truncated"
_PIECE_BYTES = 1 << 20


class HeaderVerdict(NamedTuple):
    """The kind of a header page. Without a state it holds no block; with a `fault` it is damaged, and that is where."""

    state: BlockState | None = None
    header: SlotHeader | None = None
    fault: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class SlotContent:
    """The content of one place: `slot` of `region`, which takes `stored_bytes`. Its payload begins at `payload_at` of
    the file `fd`. `used_at` (seconds since 1970) is None in a layout that does not keep it."""

    judged: HeaderVerdict
    region: int
    slot: int
    stored_bytes: int
    fd: int
    payload_at: int
    used_at: float | None

    @property
    def block(self) -> StoredBlock | None:
        """The block as the tools list it; None if this is none."""
        state, header, _ = self.judged
        if state is None or header is None:
            return None
        return StoredBlock(
            state=state,
            namespace=header.namespace,
            group=header.group,
            key=header.key,
            region=self.region,
            slot=self.slot,
            generation=header.generation,
            payload_bytes=header.payload_bytes,
            stored_bytes=self.stored_bytes,
            stored_at=stored_at(header.generation),
            used_at=self.used_at,
            epoch=header.epoch,
        )


def judge_header(header: SlotHeader, expected: SlotHeader, epoch: int | None) -> HeaderVerdict:
    """Judge a header that lies in its own place, by the fields that are known of that place and by its namespace's
    epoch (None: no epoch counts)."""
    fault = key_fault(header) if header == expected else first_difference(header, expected)
    if not fault and (epoch is None or header.epoch > epoch):
        fault = Mismatch.EPOCH
    if fault:
        return HeaderVerdict(fault=fault)
    return HeaderVerdict(BlockState.CURRENT if header.epoch == epoch else BlockState.OLD, header)


def payload_fault(fd: int, offset: int, header: SlotHeader) -> str:
    """The fault of the payload at an offset; empty if it is what was stored. Read in pieces."""
    piece = memoryview(bytearray(min(_PIECE_BYTES, header.payload_bytes)))
    digest, left = xxhash.xxh3_128(), header.payload_bytes
    while left:
        try:
            length = os.preadv(fd, [piece[:left]], offset)
        except OSError as error:
            return read_fault(error)
        if not length:
            return SHORT
        digest.update(piece[:length])
        offset, left = offset + length, left - length
    return "" if digest.digest() == header.payload_digest else Mismatch.PAYLOAD


def read_fault(error: OSError) -> str:
    """The reason for a place that cannot be read."""
    return f"unreadable_{errno.errorcode.get(error.errno or 0, 'unknown')}"


_THREADS = 4
_AHEAD = 2 * _THREADS
_NAME_MAX = 64
_MANIFEST_BYTES_MAX = 256 << 10
_SLAB_NAME = re.compile(r"slab-[0-9]{5,9}")

T = TypeVar("T")


def shown(name: str) -> str:
    """A file's name as it is safe to print."""
    return ascii(name)[1:-1][:_NAME_MAX]


class Run(Protocol):
    """Neighbouring places: what one thread reads at a time."""

    @property
    def slots(self) -> int:
        """The number of places."""


F = TypeVar("F", bound=SlotContent)
R = TypeVar("R", bound=Run)


class CheckedRun(NamedTuple, Generic[F, R]):
    """A run whose payloads were read: the keys of whole blocks by slot, and everything else with its fault, if any."""

    run: R
    whole: dict[int, bytes]
    payload_bytes: int
    others: list[tuple[F, str]]

    def page(self, findings: Sequence[Finding] = ()) -> CheckedPage[F]:
        """The run as a check counts it, with findings of the root's own records."""
        empty = self.run.slots - len(self.whole) - len(self.others)
        step = CheckStep(self.run.slots, empty, len(self.whole), self.payload_bytes, findings)
        return CheckedPage(step, self.others)


class FolderInspection(StoreInspection[F], Generic[F, R]):
    """A store in a folder under inspection. It is read by a few threads; results come in the order of their places.

    A layout implements what is abstract here. A part is what it checks and changes as a whole: a bucket, a slab root.
    Nothing is changed but with CHANGE access.
    """

    folder: GuardedFolder
    owner: str

    def __init__(self, path: str, access: Access) -> None:
        self.path = path
        self.access = access
        self.closing = ExitStack()
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="kvtier-fs-inspect")

    @classmethod
    def inspect(cls, path: str, access: Access) -> Self | None:
        """The store in a folder. See `kvtier.tier.inspection.Inspects`."""
        store = cls(path, access)
        with ExitStack() as closing, store._refusing():
            closing.callback(store.close)
            if not store.folder.enter():
                raise RootError(path, "is not there")
            about = store._open()
            if about is None:
                return None
            store.about = about
            closing.pop_all()
        return store

    def close(self) -> None:
        """End the reads in flight, close every file and release the lock. Idempotent."""
        self._threads.shutdown(cancel_futures=True)
        self.closing.close()
        self.folder.leave()

    def _refusal(self, error: OSError) -> RootError:
        return self.folder.refusal(error)

    def _pages(self) -> Iterator[Page[F]]:
        for part in self._parts():
            for run, found in self._in_order(self._list, self.runs(part)):
                yield Page(run.slots, found)

    def _check_pages(self, repair: bool) -> Iterator[CheckedPage[F]]:
        """The root's own records come first."""
        for finding in self._check_records(repair):
            yield CheckedPage(CheckStep(findings=(finding,)))
        for part in self._parts():
            yield from self._check_part(part, repair)
        yield CheckedPage(CheckStep(findings=tuple(self._end_check(repair))))

    def _check_part(self, part: int, repair: bool) -> Iterator[CheckedPage[F]]:
        for checked in self._in_order(self._verify, self.runs(part)):
            yield checked.page()

    def _forget(self, namespace: bytes) -> None:
        """The manifest stays while a process has the root open, and where the disk fails."""
        if not self.about.owner:
            with suppress(OSError):
                os.unlink(manifest_name(namespace), dir_fd=self.folder.fd)

    def _in_order(self, work: Callable[[R], T], runs: Iterable[R]) -> Iterator[T]:
        """Do something with every run, a few at once; the results come in the order of the runs."""
        waiting: deque[Future[T]] = deque()
        for run in runs:
            waiting.append(self._threads.submit(work, run))
            if len(waiting) >= _AHEAD:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()

    def _list(self, run: R) -> tuple[R, list[F]]:
        return run, list(self._read_places(run))

    def _verify(self, run: R) -> CheckedRun[F, R]:
        checked = CheckedRun[F, R](run, {}, 0, [])
        for one in self._read_places(run):
            state, header, fault = one.judged
            if state is BlockState.CURRENT and header is not None:
                fault = payload_fault(one.fd, one.payload_at, header)
                if not fault:
                    checked.whole[one.slot] = header.key
                    checked = checked._replace(payload_bytes=checked.payload_bytes + header.payload_bytes)
                    continue
            if fault or state is not None:
                checked.others.append((one, fault))
        return checked

    def holds_files(self) -> bool:
        """True if the folder holds a root of layout `files`, of whatever version, or damaged.

        Where no whole superblock of this release states the layout, the names in the folder do, and a version only
        where these say nothing: in a damaged copy it may be a flipped bit.
        """
        try:
            data = read_small(self.folder.fd, SUPERBLOCK_NAME)
            if decode_tree(data) is not None:
                return True
            if decode_superblock(data) is not None:
                return False
            names = names_in(self.folder.fd)
        except OSError:
            return False  # the layout that opens it reports the error
        if any(map(_SLAB_NAME.fullmatch, names)):
            return False
        if any(name == EPOCHS_NAME or BUCKET_NAME.match(name) for name in names):
            return True
        version = foreign_version(data)
        return version is not None and version >= FILES_VERSION - FORMAT_VERSION

    def with_manifest(self, namespace: StoredNamespace) -> StoredNamespace:
        """A namespace with what its manifest states, if there is one."""
        try:
            with plain_file(self.folder.fd, manifest_name(namespace.digest)) as fd:
                (model, tag), written = read_manifest(os.pread(fd, _MANIFEST_BYTES_MAX, 0)), os.fstat(fd).st_mtime
        except OSError:
            return namespace
        # Each session writes it. A shared root has no sessions: there it is written once.
        opened_at = written if model is not None and namespace.session is not None else namespace.opened_at
        return replace(namespace, model=model, tag=tag, opened_at=opened_at)

    def _describe(self, layout: str, identity: bytes, regions: int, notes: Iterable[str]) -> StoreAbout:
        """The store as both layouts state it."""
        return StoreAbout(
            root=self.path,
            layout=layout,
            identity=identity.hex(),
            slots=sum(run.slots for part in self._parts() for run in self.runs(part)),
            regions=regions,
            owner=self.owner,
            namespaces=self._namespaces(),
            notes=tuple(notes),
        )

    @abstractmethod
    def _open(self) -> StoreAbout | None:
        """Read what the root states of itself. None if the folder holds none of this layout. Raises OSError too."""

    @abstractmethod
    def _namespaces(self) -> tuple[StoredNamespace, ...]:
        """The namespaces that the root states, with what their manifests say."""

    @abstractmethod
    def _parts(self) -> Iterable[int]:
        """The parts of the store, in order."""

    @abstractmethod
    def runs(self, part: int) -> Iterable[R]:
        """The places of a part, in order, each run short enough for one thread."""

    @abstractmethod
    def _read_places(self, run: R) -> Iterator[F]:
        """Each place of a run that holds something; its file is open until the next one is taken."""

    @abstractmethod
    def _check_records(self, repair: bool) -> Iterator[Finding]:
        """Check what the root states of itself, before its blocks."""

    @abstractmethod
    def _end_check(self, repair: bool) -> Iterable[Finding]:
        """Check what comes last, and make repairs durable."""

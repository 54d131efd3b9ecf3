"""A root of layout `files` for `kvtier fsck`, `ls`, `du` and `gc`: read, repaired and pruned beside who uses it."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import NamedTuple, TypeVar

from kvtier.errors import RootError
from kvtier.inspection import Access, BlockState, Checked, Finding, FindingKind, Listed, StoreAbout, StoredBlock
from kvtier_fs.files.blockfile import GONE, Wrong, remove_if
from kvtier_fs.files.bucket import Bucket
from kvtier_fs.files.folder import Busy
from kvtier_fs.files.places import BlockPlace, bucket_name
from kvtier_fs.inspect_files_blocks import Found, looked_at, stored_block
from kvtier_fs.inspect_files_records import check_bucket, check_leases, check_records, count_anew
from kvtier_fs.inspect_files_root import InspectedTree, Run
from kvtier_fs.inspect_reading import LEFTOVERS, Readers, payload_fault, read_fault
from kvtier_fs.texts import manifest_name

T = TypeVar("T")

_REMOVED_AT_ONCE = 256
"""Blocks that are removed under one holding of a bucket's lock: stores of others wait for it for a second at most."""
_KEPT_NOT = "how often blocks were hit is not kept on disk; when they were used last is, to the minute"
_SHARED = "others may store and evict while this is read; what comes or goes meanwhile may be missed"


def inspect_files(path: str, access: Access) -> FilesInspection:
    """The `files` root in a folder. Raises RootError, having let go of everything."""
    root = InspectedTree(path, access)
    try:
        root.open()
        return FilesInspection(root)
    except OSError as error:
        root.close()
        raise root.folder.refusal(error) from error
    except BaseException:
        root.close()
        raise


class _Kept(NamedTuple):
    """A block and what tells its file again."""

    block: StoredBlock
    place: BlockPlace
    wrong: Wrong


class _Fault(NamedTuple):
    """Something damaged in the place of a block."""

    place: BlockPlace
    wrong: Wrong
    reason: str
    where: str


class _RunChecked(NamedTuple):
    checked: Checked
    faults: tuple[_Fault, ...] = ()


class FilesInspection:
    """One `files` root under inspection. Files are read by a few threads, results come in the order of places.

    What is removed is removed under its bucket's lock, if it is still what was read.
    """

    def __init__(self, root: InspectedTree) -> None:
        self._root = root
        self._readers = Readers()
        notes = [_KEPT_NOT, _SHARED] if root.holders else [_KEPT_NOT]
        self.about = StoreAbout(
            root=root.path,
            layout="files",
            identity=root.tree.root_uuid.hex(),
            slots=sum(len(run.names) for number in root.buckets() for run in root.runs(number)),
            regions=root.tree.buckets,
            region_bytes=0,
            session=None,
            clean=None,
            owner=root.owner,
            namespaces=root.namespaces(),
            notes=tuple(notes),
        )

    def close(self) -> None:
        """End the reads under way and let go of the root. Idempotent."""
        self._readers.close()
        self._root.close()

    def blocks(self) -> Iterator[Listed]:
        """Every block that has a whole header, in the order of their places. Payloads are not read."""
        for number in self._buckets():
            for slots, kept in self._kept(number):
                yield Listed(slots, [one.block for one in kept])

    def check(self, repair: bool) -> Iterator[Checked]:
        """Verify the root's own records, then every block with its payload, then the accounts of the buckets.

        Repair removes what is damaged and the temporaries of processes that are gone, and counts buckets anew.
        """
        try:
            for finding in check_records(self._root, repair):
                yield Checked(findings=(finding,))
            for number in self._buckets():
                yield from self._check_bucket(number, repair)
            yield Checked(findings=tuple(check_leases(self._root, repair)))
        except OSError as error:
            raise self._root.folder.refusal(error) from error

    def drop(self, chosen: Callable[[StoredBlock], bool]) -> Iterator[Listed]:
        """Remove chosen blocks, yielding these; a namespace without any left loses its manifest, if the root is idle.

        Raises RootError if a bucket's lock is not to be had or the disk does not take it; what was dropped until then
        stays dropped.
        """
        dropped: set[bytes] = set()
        left: set[bytes] = set()
        for number in self._buckets():
            going: list[_Kept] = []
            for slots, kept in self._kept(number):
                going += [one for one in kept if chosen(one.block)]
                left |= {one.block.namespace for one in kept if not chosen(one.block)}
                yield Listed(slots, ())
            gone = self._drop(number, going)
            dropped |= {block.namespace for block in gone}
            yield Listed(0, gone)
        if not self._root.holders:
            for namespace in dropped - left:
                self._remove_manifest(namespace)

    # -- reading -----------------------------------------------------------------------------------------------------

    def _buckets(self) -> list[int]:
        try:
            return self._root.buckets()
        except OSError as error:
            raise self._root.folder.refusal(error) from error

    def _found(self, run: Run) -> Iterator[tuple[int, Found]]:
        """Each file of a run that is still there, open while it is yielded, with its number in the bucket."""
        try:
            with self._root.leaf(run.bucket, run.leaf) as leaf_fd:
                for number, name in enumerate(run.names, run.first):
                    place = BlockPlace(run.bucket, run.leaf, name)
                    with looked_at(leaf_fd, place, self._root.tree, self._root.epoch) as found:
                        if found is not None:
                            yield number, found
        except OSError as error:
            if error.errno not in (*GONE, errno.ELOOP):
                raise

    def _kept(self, number: int) -> Iterator[tuple[int, list[_Kept]]]:
        """The blocks of a bucket, a run at a time. Raises RootError."""

        def work(run: Run) -> tuple[int, list[_Kept]]:
            kept = []
            for index, found in self._found(run):
                block = stored_block(found, index)
                if block is not None:
                    kept.append(_Kept(block, found.place, found.wrong))
            return len(run.names), kept

        try:
            yield from self._readers.in_order(work, self._root.runs(number))
        except OSError as error:
            raise self._root.folder.refusal(error) from error

    def _check_run(self, run: Run) -> _RunChecked:
        findings: list[Finding] = []
        faults: list[_Fault] = []
        whole = payload_bytes = 0
        for _, found in self._found(run):
            state, header, fault = found.judged
            if state is BlockState.CURRENT and header is not None:
                fault = payload_fault(found.fd, self._root.tree.header_bytes, header)
                whole, payload_bytes = whole + (not fault), payload_bytes + (0 if fault else header.payload_bytes)
            elif state is not None:
                findings.append(Finding(LEFTOVERS[state], state.value, found.where))
            if fault:
                faults.append(_Fault(found.place, found.wrong, fault, found.where))
        return _RunChecked(Checked(len(run.names), 0, whole, payload_bytes, findings), tuple(faults))

    # -- changing ----------------------------------------------------------------------------------------------------

    def _check_bucket(self, number: int, repair: bool) -> Iterator[Checked]:
        try:
            yield Checked(findings=check_bucket(self._root, number, repair))
        except OSError as error:
            if error.errno not in (*GONE, errno.ELOOP):  # no folder: told already, or gone meanwhile
                yield Checked(findings=(Finding(FindingKind.CORRUPT, read_fault(error), bucket_name(number)),))
        removed = False
        for checked, faults in self._readers.in_order(self._check_run, self._root.runs(number)):
            gone = self._remove(number, [(fault.place, fault.wrong) for fault in faults]) if repair and faults else []
            corrupt = [Finding(FindingKind.CORRUPT, fault.reason, fault.where, fault.place in gone) for fault in faults]
            yield checked._replace(findings=[*corrupt, *checked.findings])
            removed = removed or bool(gone)
        if removed:
            count_anew(self._root, number)

    def _remove(self, number: int, wrong: list[tuple[BlockPlace, Wrong]]) -> list[BlockPlace]:
        """Remove files that are still what was found, durably. Returns those that went; none where others hold the
        bucket's lock. The bucket is to be counted anew afterwards: until then its account says too much, or is gone."""

        def work(bucket: Bucket) -> list[BlockPlace]:
            gone = [place for place, one in wrong if self._remove_one(bucket, place, one)]
            for leaf in {place.leaf for place in gone}:
                with self._root.leaf(number, leaf) as leaf_fd:
                    os.fsync(leaf_fd)
            return gone

        try:
            gone = self._root.changing(number, work)
        except OSError:
            return []
        return [] if isinstance(gone, Busy) else gone

    def _remove_one(self, bucket: Bucket, place: BlockPlace, wrong: Wrong) -> bool:
        try:
            return bucket.remove(self._root.claim(place), wrong)
        except OSError:
            return False

    def _drop(self, number: int, going: list[_Kept]) -> list[StoredBlock]:
        """Remove blocks of a bucket that are still what was read, then count it anew. Returns those that went."""
        gone: list[_Kept] = []
        for start in range(0, len(going), _REMOVED_AT_ONCE):
            part = going[start : start + _REMOVED_AT_ONCE]
            gone += self._locked(number, partial(self._drop_part, part))
        orphaned: bool = self._locked(number, Bucket.has_temporaries)
        if going or orphaned:
            self._locked(number, Bucket.sweep)
        return [one.block for one in gone]

    def _drop_part(self, part: list[_Kept], _: Bucket) -> list[_Kept]:
        gone = []
        for bucket, leaf in sorted({(one.place.bucket, one.place.leaf) for one in part}):
            with self._root.leaf(bucket, leaf) as leaf_fd:
                for one in part:
                    if one.place.leaf == leaf and remove_if(leaf_fd, self._root.claim(one.place), one.wrong):
                        gone.append(one)
                os.fsync(leaf_fd)
        return gone

    def _locked(self, number: int, work: Callable[[Bucket], T]) -> T:
        """Do some work under a bucket's lock. Raises RootError."""
        try:
            result = self._root.changing(number, work)
        except OSError as error:
            raise self._root.folder.refusal(error) from error
        if isinstance(result, Busy):
            raise RootError(self._root.path, f"{bucket_name(number)} stays locked by another process; try again")
        return result

    def _remove_manifest(self, namespace: bytes) -> None:
        with suppress(OSError):
            os.unlink(manifest_name(namespace), dir_fd=self._root.folder.fd)

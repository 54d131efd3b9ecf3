"""A root of layout `files` for `kvtier fsck`, `ls`, `du` and `gc`: read, repaired and pruned beside its users."""

import os
from collections.abc import Iterable, Iterator
from functools import partial

from kvtier.errors import RootError
from kvtier.tier.inspection import CheckStep, Finding, FindingKind
from kvtier_fs.inspect.found import read_fault
from kvtier_fs.inspect.shared_blocks import FileContent, opened_file
from kvtier_fs.inspect.shared_records import check_bucket, check_leases, check_records, count_anew
from kvtier_fs.inspect.shared_root import NOT_THERE, FileRun, InspectedTree
from kvtier_fs.shared.block_file import remove_if
from kvtier_fs.shared.bucket import Bucket
from kvtier_fs.shared.folder import vanished
from kvtier_fs.shared.paths import BlockPlace, bucket_name


class SharedInspection(InspectedTree):
    """One root of layout `files` under inspection, with its blocks. Other processes use it at the same time.

    A block is removed under the lock of its bucket, if it is still what was read.
    """

    def _found(self, run: FileRun) -> Iterator[FileContent]:
        with vanished(NOT_THERE), self.folder.leaf(run.bucket, run.leaf) as leaf_fd:
            for number, name in enumerate(run.names, run.first):
                place = BlockPlace(run.bucket, run.leaf, name)
                with opened_file(leaf_fd, place, number, self.tree, self.epoch) as found:
                    if found is not None:
                        yield found

    def _place_in_words(self, one: FileContent) -> str:
        return "/".join(part for part in (bucket_name(one.place.bucket), one.place.leaf, one.place.name) if part)

    def _remove(self, part: int, found: list[FileContent], must: bool) -> set[FileContent]:
        """The bucket is to be counted anew afterwards: until then its account states too much, or is gone."""
        try:
            return self.changing(part, partial(self._remove_locked, found, must))
        except (OSError, RootError):
            if must:
                raise
            return set()

    def _remove_locked(self, found: list[FileContent], must: bool, _: Bucket) -> set[FileContent]:
        gone = set()
        for bucket, leaf in sorted({(one.place.bucket, one.place.leaf) for one in found}):
            with self.folder.leaf(bucket, leaf) as leaf_fd:
                for one in found:
                    try:
                        if remove_if(leaf_fd, one.place.name, one.wrong):
                            gone.add(one)
                    except OSError:
                        if must:
                            raise
                os.fsync(leaf_fd)
        return gone

    def _check_records(self, repair: bool) -> Iterator[Finding]:
        return check_records(self, repair)

    def _check_part(self, part: int, repair: bool) -> Iterator[CheckStep]:
        """The bucket's names and account, then its blocks; where some were removed, the account is counted anew."""
        try:
            yield CheckStep(findings=check_bucket(self, part, repair))
        except OSError as error:
            if error.errno not in NOT_THERE:  # no folder: reported already, or gone meanwhile
                yield CheckStep(findings=(Finding(FindingKind.CORRUPT, read_fault(error), bucket_name(part)),))
        removed = False
        for checked in super()._check_part(part, repair):
            yield checked
            removed = removed or any(finding.repaired for finding in checked.findings)
        if removed:
            count_anew(self, part)

    def _end_check(self, repair: bool) -> Iterable[Finding]:
        return check_leases(self, repair)

    def _end_drop(self, part: int, removed: int) -> None:
        """Count a bucket anew that lost blocks or holds temporaries of processes that died."""
        if removed or self.bucket(part).has_temporaries():
            self.changing(part, Bucket.sweep)

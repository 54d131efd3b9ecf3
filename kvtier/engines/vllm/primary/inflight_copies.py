"""Copies issued to vLLM's workers, and how the end of one is detected when vLLM does not report it.

After a reset vLLM forgets its jobs while the workers still run them, with asynchronous scheduling for several steps.
vLLM 0.33 reports when all of them have ended, vLLM 0.32 does not. Each worker counts the uses of a row that it has
ended in the region's control area; a forgotten copy has ended when every use of its rows that was ever issued has been
ended by every worker that makes it: all of them load, those with a slice of their own in a row store.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from kvtier.stack.workers.engine_copier import EngineCopies
from kvtier.tier.contract import SharedRows
from kvtier.types.arrays import IntArray
from kvtier.types.jobs import JobKind, TransferJob
from kvtier.types.keys import JobId, OffloadKey


class InflightCopies:
    """Every copy that was issued to the workers and has not ended, by the names under which vLLM reports its end.

    `copiers[i]` takes the place of worker i in the stack; the first `num_storing` workers make the stores.
    """

    def __init__(self, rows: SharedRows, copiers: Sequence[EngineCopies], num_storing: int) -> None:
        self._region = rows
        self._copiers = copiers
        self._num_storing = num_storing
        self._issued = np.zeros((len(copiers), rows.num_rows), dtype=np.int64)
        self._reported: dict[str | OffloadKey, TransferJob] = {}
        self._forgotten: dict[JobId, TransferJob] = {}

    @property
    def reported(self) -> int:
        """Names whose end vLLM has yet to report."""
        return len(self._reported)

    @property
    def forgotten(self) -> int:
        """Copies that vLLM does not report any more and whose rows are still in use."""
        return len(self._forgotten)

    def issue(self, names: Iterable[str | OffloadKey], job: TransferJob) -> None:
        """A request's only load, named by the request's id; or a store, named by its keys, which no other stores."""
        self._issued[: self._workers(job), _rows(job)] += 1
        self._reported.update(dict.fromkeys(names, job))

    def end(self, names: Iterable[str | OffloadKey], reason: int = 0) -> None:
        """vLLM reports the end of the copies of these names; `reason` is an errno if what they stored is of no use."""
        found = {job.job_id: job for name in names if (job := self._reported.pop(name, None)) is not None}
        for job in found.values():
            self._end(job, reason)

    def forget(self) -> None:
        """vLLM will not report any of them again."""
        self._forgotten |= {job.job_id: job for job in self._reported.values()}
        self._reported.clear()

    def end_forgotten(self) -> None:
        """vLLM says that the workers have ended every copy it forgot."""
        for job in self._forgotten.values():
            self._end(job)
        self._forgotten.clear()

    def poll(self) -> None:
        """End forgotten copies whose rows are not in use any more."""
        for job_id in [job_id for job_id, job in self._forgotten.items() if self._has_ended(job)]:
            self._end(self._forgotten.pop(job_id))

    def _end(self, job: TransferJob, reason: int = 0) -> None:
        for copier in self._copiers[: self._workers(job)]:
            copier.end((job.job_id,), reason)

    def _workers(self, job: TransferJob) -> int:
        """The number of workers that make a copy, from worker 0 on."""
        return len(self._copiers) if job.kind is JobKind.LOAD else self._num_storing

    def _has_ended(self, job: TransferJob) -> bool:
        rows = _rows(job)
        return all(
            bool((self._region.uses_ended(worker, rows) >= issued[rows]).all())
            for worker, issued in enumerate(self._issued[: self._workers(job)])
        )


def _rows(job: TransferJob) -> IntArray:
    return np.concatenate([group.rows for group in job.gpu_groups])

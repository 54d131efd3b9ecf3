"""Copies handed to vLLM's workers, and how it is known that one has ended when vLLM does not say so.

After a reset vLLM forgets its jobs while the workers still run them, with asynchronous scheduling for several steps.
Each worker counts the uses of a row that it has ended in the region's control area; a forgotten copy is over when
every use of its rows that was ever handed out has been ended by every worker that makes it: all of them load, those
with a slice of their own in a row store.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvtier.jobs import IntArray, TransferJob
from kvtier.keys import JobId, OffloadKey
from kvtier.loadstore import Rows


@dataclass(frozen=True, slots=True, eq=False)
class HandedOver:
    """One copy: the stack's own job, its rows, and how many workers make it, from worker 0 on."""

    job_id: JobId
    rows: IntArray
    workers: int


class Outstanding:
    """Every copy that was handed over and has not ended. `loads` by request, `stores` by each of their keys."""

    def __init__(self, rows: Rows, num_workers: int, num_storing: int) -> None:
        self._region = rows
        self._num_workers, self._num_storing = num_workers, num_storing
        self._issued = np.zeros((num_workers, rows.num_rows), dtype=np.int64)
        self._loads: dict[str, HandedOver] = {}
        self._stores: dict[OffloadKey, HandedOver] = {}
        self._forgotten: list[HandedOver] = []

    def load(self, request_id: str, job: TransferJob) -> None:
        """A request's load; a request has one at a time."""
        self._loads[request_id] = self._hand_over(job, self._num_workers)

    def store(self, keys: Sequence[OffloadKey], job: TransferJob) -> None:
        """A store of these keys; no other store of any of them is under way."""
        handed = self._hand_over(job, self._num_storing)
        for key in keys:
            self._stores[key] = handed

    def _hand_over(self, job: TransferJob, workers: int) -> HandedOver:
        rows = np.concatenate([group.slots for group in job.groups])
        self._issued[:workers, rows] += 1
        return HandedOver(job.job_id, rows, workers)

    def end_load(self, request_id: str) -> list[HandedOver]:
        """vLLM says that a request's load has ended; the copies that are over by that."""
        handed = self._loads.pop(request_id, None)
        return [] if handed is None else [handed]

    def end_store(self, keys: Sequence[OffloadKey]) -> list[HandedOver]:
        """vLLM says that the store of these keys has ended."""
        ended = {handed.job_id: handed for key in keys if (handed := self._stores.pop(key, None)) is not None}
        return list(ended.values())

    def forget(self) -> None:
        """vLLM will not mention any of them again."""
        seen = {handed.job_id: handed for handed in (*self._loads.values(), *self._stores.values())}
        self._forgotten += seen.values()
        self._loads.clear()
        self._stores.clear()

    def ended(self) -> list[HandedOver]:
        """Forgotten copies that have ended since the last call."""
        over = [handed for handed in self._forgotten if self._over(handed)]
        if over:
            gone = {handed.job_id for handed in over}
            self._forgotten = [handed for handed in self._forgotten if handed.job_id not in gone]
        return over

    @property
    def forgotten(self) -> int:
        """Copies that vLLM does not speak of any more and whose rows are still in use."""
        return len(self._forgotten)

    def _over(self, handed: HandedOver) -> bool:
        return all(
            bool((self._region.uses_ended(worker, handed.rows) >= issued[handed.rows]).all())
            for worker, issued in enumerate(self._issued[: handed.workers])
        )

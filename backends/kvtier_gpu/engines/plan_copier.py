"""Issues the copies of plans, each group's by its path."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch

from kvtier_gpu.copy_plan import CopyPlan, Extents, GroupPages, extents, rows_of, split
from kvtier_gpu.engines.contract import CopyFailure
from kvtier_gpu.engines.copy_lane import CopyLane
from kvtier_gpu.engines.copy_paths import CopyPath
from kvtier_gpu.engines.gather import GatherCopier, move_pages

STAGING_BYTES = 16 << 20
URGENT_STAGING_BYTES = 4 << 20


class PlanCopier:
    """Issues copies to one lane. `paths[g]` is the path of group g; those that gather share about so much staging.

    What the driver's call refuses is copied once more, an operation of torch for each piece: a driver that refuses
    costs time and no blocks.
    """

    def __init__(self, lane: CopyLane, paths: Sequence[CopyPath], staging_bytes: int) -> None:
        self._lane = lane
        self._paths = tuple(paths)
        self._region = torch.from_numpy(lane.sides.region)
        gathered = [lane.sides.groups[group] for group, path in enumerate(paths) if path is CopyPath.GATHER]
        pages = [group.table.page_bytes for group in gathered]
        self._staging_bytes = -(-max(staging_bytes, *pages) // 8) * 8 if pages else 0
        self._gather = GatherCopier(lane, self._region, lane.sides.device.empty(self._staging_bytes))

    @property
    def driver_error(self) -> int:
        """The driver's answer to the last call that it refused, of any lane; 0 if it has refused none."""
        batch = self._lane.sides.batch
        return 0 if batch is None else batch.last_error

    def issue(self, plan: CopyPlan) -> list[CopyFailure]:
        """Issue every copy of a plan, what can be issued of it. Returns why some were not, with their rows."""
        batched = [pages for pages in plan.groups if self._paths[pages.table.group] is CopyPath.BATCH]
        others = [pages for pages in plan.groups if self._paths[pages.table.group] is not CopyPath.BATCH]
        parts = [(part, self._issue_pages) for part in split(plan.of(others), max(1, self._staging_bytes))]
        if batched:
            parts += [(part, self._issue_single) for part in self._issue_batched(batched)]
        failures = []
        for part, issue in parts:
            try:
                for pages in part:
                    issue(pages)
            except Exception as refusal:
                failures.append(CopyFailure(refusal.with_traceback(None), rows_of(part, plan.row_bytes)))
        return failures

    def _issue_batched(self, groups: Sequence[GroupPages]) -> list[tuple[GroupPages, ...]]:
        """Issue all copies of groups by one call. No piece reaches into another row: rows may be pinned apart.

        Returns the pages of each call that the driver refused.
        """
        row_bytes = self._lane.sides.rows.row_bytes
        found = [extents(pages, row_bytes) for pages in groups]
        columns = zip(*((one.gpu, one.region, one.lengths) for one in found), strict=True)
        refused = self._lane.call(Extents(*map(np.concatenate, columns)))
        return [tuple([pages.in_rows(rows, row_bytes) for pages in groups]) for rows in refused]

    def _issue_pages(self, pages: GroupPages) -> None:
        if self._paths[pages.table.group] is CopyPath.GATHER:
            self._gather.copy(pages)
        else:
            self._issue_single(pages)

    def _issue_single(self, pages: GroupPages) -> None:
        lane = self._lane
        group = lane.sides.groups[pages.table.group]
        lane.enqueue(partial(move_pages, group, self._region, pages, lane.direction))

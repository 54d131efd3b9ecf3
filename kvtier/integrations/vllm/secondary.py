"""kvtier's filesystem tier below vLLM's own CPU tier: `type: KVTierFs`, `module_path: kvtier.integrations.vllm`."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    Locality,
    Medium,
    OffloadingEvent,
    OffloadingMetricMetadata,
    OffloadingSpec,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.base import LookupResult as VLLMAnswer
from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager
from vllm.v1.kv_offload.tiering.base import TransferJob as VLLMJob

from kvtier.control.board import LowerTier, TierPlan
from kvtier.integrations.vllm.metrics import Meter, definitions
from kvtier.integrations.vllm.secondary_driver import Answer, SecondaryDriver, Staged
from kvtier.integrations.vllm.secondary_metrics import tier_stats
from kvtier.integrations.vllm.secondary_options import (
    GroupNames,
    SecondaryOptions,
    own_share,
    read_options,
    tier_namespace,
)
from kvtier.integrations.vllm.secondary_plane import PlaneLimits, SecondaryPlane
from kvtier.integrations.vllm.secondary_staging import PrimaryRows
from kvtier.integrations.vllm.secondary_transfers import Transfer
from kvtier.jobs import JobKind, int_array
from kvtier.keys import FS, OffloadKey
from kvtier.loadstore import LookupResult
from kvtier.stack import StackStats
from kvtier.stack.dispatcher import Told

PINNED_SHARE = 2
"""One part in this many of vLLM's rows may be held by stores that take long."""

_ANSWERS = {
    LookupResult.HIT: VLLMAnswer.HIT,
    LookupResult.HIT_PENDING: VLLMAnswer.HIT,
    LookupResult.RETRY: VLLMAnswer.RETRY,
    LookupResult.MISS: VLLMAnswer.MISS,
}
_log = logging.getLogger("vllm.kvtier.fs")


class KVTierFs(SecondaryTierManager):  # type: ignore[misc]
    """A disk that is bounded, verified and found again after a restart, for vLLM's `TieringOffloadingSpec`.

    Touched by the scheduler's thread alone. Only the constructor, `drain_jobs` and `shutdown` wait for anything, each
    with a deadline. A block that cannot be loaded in time, or is not what was stored, is reported as failed and is a
    miss for its request from then on. vLLM's rows, its padding included, are stored as they are.
    """

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: BackpressureDetector | None = None,
        **keys: Any,
    ) -> None:
        """Open the tier. Raises ConfigError for wrong keys, ResourceError or GeometryError for a machine that will not
        do; nothing is left behind then, and vLLM's memory is not referred to."""
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        config = offloading_spec.config
        options = own_share(read_options(keys, tier_type), config)
        self.locality = Locality(options.locality) if options.locality is not None else None
        self._names = GroupNames([group.group_id for group in config.groups])
        self._events = options.enable_kv_events and offloading_spec.kv_events_config.enable_kv_cache_events
        self._drain_seconds = options.drain_timeout_seconds
        self._label = options.name or tier_type
        self._primary = PrimaryRows(primary_kv_view)
        self._shut = False
        try:
            namespace = tier_namespace(config, options, self._primary.row_bytes)
            self._driver = SecondaryDriver(options, namespace, self._primary)
            staged = self._driver.open()
            try:
                self._begin(options, staged)
            except BaseException:
                self._driver.close()
                raise
        except BaseException:
            self._primary.release()
            raise

    def _begin(self, options: SecondaryOptions, staged: Staged) -> None:
        opened = staged.opened
        plan = TierPlan(self._label, FS, opened, options.policy, timeout_seconds=options.job_timeout_seconds)
        lower = LowerTier(1, plan, staged.lane_rows)
        limits = PlaneLimits(staged.part_blocks, max(1, self._primary.num_rows // PINNED_SHARE), opened.epoch)
        self._plane = SecondaryPlane(lower, limits, self._driver.passages)
        self._staged = staged
        self._meter = Meter()
        if not self._events:
            self._plane.take_changes()
        for note in opened.notes:
            _log.warning("%s: %s", self._label, note)
        _log.info("%s", self._description(staged, lower))

    def _description(self, staged: Staged, lower: LowerTier) -> str:
        opened, primary = staged.opened, self._primary
        kept = f"{len(lower.owned.directory)} blocks found, " if lower.owned is not None else ""
        padded = "" if staged.row_bytes == primary.row_bytes else f" (vLLM's {primary.row_bytes} and padding)"
        return (
            f"{self._label} is open: {opened.mode}, {opened.capacity_bytes} bytes at most, {kept}"
            f"rows of {staged.row_bytes} bytes{padded}, staged through {2 * staged.lane_rows} rows of its own"
        )

    # -- questions -----------------------------------------------------------------------------------------------

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """A request that vLLM will ask about."""
        self._plane.begin_request(req_context.req_id)
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Nothing more is asked for this request; its jobs go on."""
        self._plane.end_request(req_context.req_id)

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> VLLMAnswer:
        """HIT: here, and kept until the step ends. RETRY: a store shared with others was asked. MISS."""
        if self._shut:
            return VLLMAnswer.MISS
        return _ANSWERS[self._plane.lookup(self._names.own(key), req_context.req_id, time.monotonic())]

    # -- jobs ----------------------------------------------------------------------------------------------------

    def submit_store(self, job_metadata: VLLMJob) -> None:
        """Begin to store rows that vLLM keeps for us until the job is reported."""
        self._plane.store(self._transfer(JobKind.STORE, job_metadata), time.monotonic())
        self._send()

    def submit_load(self, job_metadata: VLLMJob) -> None:
        """Begin to load into rows that are ours until the job is reported."""
        self._plane.load(self._transfer(JobKind.LOAD, job_metadata), time.monotonic())
        self._send()

    def _transfer(self, kind: JobKind, job: VLLMJob) -> Transfer:
        """vLLM's job with its blocks in the order of the prefix, where vLLM says what that is."""
        keys = list(job.keys)
        positions = [job.req_context.get_offload_key_position(key) for key in keys]
        order: Sequence[int] = range(len(keys))
        if None not in positions:
            order = sorted(order, key=positions.__getitem__)
        own = [self._names.own(keys[i]) for i in order]
        chunks = int_array(np.asarray(job.chunk_ids, dtype=np.int64)[np.array(order, dtype=np.int64)])
        return Transfer(job.job_id, kind, own, chunks, job.req_context.req_id, time.monotonic())

    def _send(self) -> None:
        jobs, questions = self._plane.take_jobs(), self._plane.take_questions()
        if self._shut:
            self._plane.give_up(time.monotonic())
        elif jobs or questions:
            self._driver.send(jobs, questions)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Every job that ended since the last call, each once."""
        self._take_in()
        return [self._result(transfer) for transfer in self._plane.take_ended()]

    def _take_in(self) -> None:
        if self._shut:
            return
        plane, now = self._plane, time.monotonic()
        for item in self._driver.receive():
            if isinstance(item, Answer):
                plane.answer(item.keys, item.results, now)
            elif item.told is Told.FINISHED and item.result is not None:
                plane.finish(item.result, now)
            elif item.told is Told.LATE:
                plane.late(item.job_id, now)
            else:
                plane.ended(item.job_id, now)
        if plane.busy and not self._driver.alive:
            _log.error("%s: the thread that moves blocks is gone", self._label)
            plane.give_up(now)
        plane.relieve(now)
        if not self._events:
            plane.take_changes()

    def _result(self, transfer: Transfer) -> JobResult:
        good = None
        if transfer.kind is JobKind.LOAD and not transfer.ok:
            good = tuple(self._names.vllm(key) for key in transfer.good_keys) or None
        return JobResult(
            job_id=transfer.job_id,
            success=transfer.ok,
            successful_keys=good,
            transfer_time=transfer.seconds,
            transfer_bytes=transfer.bytes_moved,
        )

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """The step's loads were submitted before this: what it was promised need not be kept any longer."""
        self._plane.end_step()
        self._send()

    # -- the rest ------------------------------------------------------------------------------------------------

    def drain_jobs(self) -> None:
        """Return when nothing touches vLLM's rows any more: jobs that have not ended in time have failed."""
        self._drain()

    def _drain(self) -> None:
        deadline = time.monotonic() + self._drain_seconds
        self._take_in()
        while self._plane.busy and (left := deadline - time.monotonic()) > 0:
            self._driver.wait(left)
            self._take_in()
        given_up = self._plane.give_up(time.monotonic())
        if given_up:
            _log.warning("%s: %d blocks on their way were given up", self._label, given_up)

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Blocks that became reachable on the disk or ceased to be; none unless `enable_kv_events` and vLLM's own are
        set."""
        if not self._events:
            return
        for removed, keys in self._plane.take_changes():
            names = [self._names.vllm(key) for key in keys]
            yield OffloadingEvent(keys=names, medium=self.medium, removed=removed, locality=self.locality)

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        """The tier's metrics."""
        return definitions()

    def get_stats(self) -> OffloadingConnectorStats | None:
        """What changed since the last call; once a second."""
        return self._meter.read(self.stats()) if self._meter.due else None

    def stats(self) -> StackStats:
        """Figures since the tier was opened; also after a shutdown."""
        plane, staged = self._plane, self._staged
        return tier_stats(plane.lower, staged.opened, staged.lanes, plane.backlog, time.monotonic())

    def shutdown(self) -> None:
        """Drain within the deadline, let go of vLLM's memory, then close the tier. Idempotent.

        A disk that is stuck keeps memory of our own, never vLLM's.
        """
        if self._shut or self._driver.elsewhere:
            return
        self._drain()
        self._shut = True
        self._driver.passages.shut_all()
        self._primary.release()
        self._driver.close()

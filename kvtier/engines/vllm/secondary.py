"""Filesystem tiers below vLLM's own CPU tier, which its tiering spec calls: types `KVTierFs` and `KVTierSharedFs`."""

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

from pydantic import Field
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.canonical_mapping import canonical_format_id
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
from vllm.v1.kv_offload.config import OffloadingConfig
from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager
from vllm.v1.kv_offload.tiering.base import TransferJob as VLLMJob

from kvtier.engines.engine_memory.memory import PagedMemory
from kvtier.engines.engine_memory.options import EngineMemoryOptions, engine_part, read_options
from kvtier.engines.engine_memory.tier import EngineMemoryTier
from kvtier.engines.engine_memory.transfers import EngineTransfer
from kvtier.engines.vllm import settings
from kvtier.engines.vllm.adapters import content_in_keys
from kvtier.engines.vllm.compat import LOGGER, require_tested
from kvtier.engines.vllm.engine_config import engine_config, engine_share, reason_for_no_blocks
from kvtier.engines.vllm.engine_settings import environment_of, settings_of
from kvtier.engines.vllm.metrics import Meter, definitions
from kvtier.engines.vllm.model_code import ModelCode
from kvtier.engines.vllm.settings import GroupIds, one_hash_per_key
from kvtier.errors import ConfigError
from kvtier.stack import StackStats
from kvtier.tier.contract import LookupResult
from kvtier.types.arrays import int_array
from kvtier.types.jobs import JobKind
from kvtier.types.keys import OffloadKey
from kvtier.types.namespace import Namespace

NAMESPACE_REQUIRED = (
    "is required, because vLLM shows a secondary tier no model: name the weights and their quantisation, rope scaling, "
    "max_model_len, adapters, attention backend, the model's own code and processors, and change it when one of them "
    "changes"
)


class SecondaryOptions(EngineMemoryOptions):
    """The keys beside those of the filesystem backend."""

    namespace: str = Field(
        default="",
        max_length=256,
        description="required: names all that decides the bytes and that vLLM does not tell a secondary tier: weights "
        "and their quantisation, rope scaling, max_model_len, adapters, attention backend; "
        "stores with different tags never share a block",
    )
    enable_kv_events: bool = Field(default=False, description="emit KV events for what is stored and removed here")
    locality: Literal["LOCAL", "REMOTE"] | None = Field(default=None, description="where vLLM is to say the store is")


def secondary_options(keys: Mapping[str, Any], tier_type: str, backend: str) -> SecondaryOptions:
    """The options of one entry of `secondary_tiers`. Raises ConfigError with one line for each thing that is wrong."""
    at = f"secondary_tiers.{tier_type}"
    options = read_options(SecondaryOptions, backend, keys, at)
    if not options.namespace:
        raise ConfigError(NAMESPACE_REQUIRED, f"{at}.namespace")
    return options


def tier_namespace(config: OffloadingConfig, tag: str, row_bytes: int, engine: VllmConfig | None = None) -> Namespace:
    """Everything that identifies vLLM's rows, as far as a secondary tier sees it: its configuration, the engine's
    arguments and variables, the plug-ins that it has loaded. `tag` names the rest.

    Raises ConfigError if vLLM has no KV cache.
    """
    known = settings.namespace(config, tag)
    parallel = config.parallel
    canonical = canonical_format_id(config.kv_cache_layout) if config.canonical_layout else False
    extra = {
        "rows": "vllm tiering",
        "row_bytes": str(row_bytes),
        "canonical_layout": str(canonical),
        "pipeline_parallel_size": str(parallel.pp_size),
        "prefill_context_parallel_size": str(parallel.pcp_size),
        "decode_context_parallel_size": str(parallel.dcp_size),
    }
    seen = ModelCode.of((), processors=False).fields() | (environment_of() if engine is None else settings_of(engine))
    if engine is not None and parallel.pcp_size * parallel.dcp_size > 1:
        seen["cp_kv_cache_interleave_size"] = str(engine.parallel_config.cp_kv_cache_interleave_size)
    return replace(known, extra={**known.extra, **extra, **seen})


_ANSWERS = {result: VLLMAnswer[result.name] for result in LookupResult}
_log = logging.getLogger(f"{LOGGER}.fs")


class KVTierFs(SecondaryTierManager):  # type: ignore[misc]
    """A disk that is bounded, verified and found again after a restart, for vLLM's `TieringOffloadingSpec`.

    An adapter: it translates vLLM's calls for `EngineMemoryTier`. Called by one thread at a time: the scheduler's, or
    with vLLM 0.33 another that holds vLLM's lock. Only the constructor, `drain_jobs` and `shutdown` wait for anything,
    each with a deadline.
    """

    medium: ClassVar[Medium] = Medium.STORAGE
    backend: ClassVar[str] = "fs"
    """The type of kvtier's tier that keeps the blocks."""

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: BackpressureDetector | None = None,
        **keys: Any,
    ) -> None:
        """Open the tier. Raises ConfigError for wrong keys, ResourceError or GeometryError for a machine that does not
        suffice; nothing is left behind then, and vLLM's memory is not referred to."""
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        config = offloading_spec.config
        require_tested(config.extra_config)
        known = engine_config(config.engine_id)
        options = engine_part(secondary_options(keys, tier_type, self.backend), *engine_share(config.parallel, known))
        no_blocks = reason_for_no_blocks(known)
        self._keeps_blocks = not no_blocks
        if no_blocks:
            _log.warning(no_blocks)
        self.locality = Locality(options.locality) if options.locality is not None else None
        self._ids = GroupIds([group.group_id for group in config.groups])
        self._events = options.enable_kv_events and offloading_spec.kv_events_config.enable_kv_cache_events
        self._loaded: list[OffloadKey] = []
        self._meter = Meter()
        self._refused: list[int] = []
        memory = PagedMemory.of_rows(primary_kv_view, len(config.groups))
        self._adapters = content_in_keys(self)
        try:
            namespace = tier_namespace(config, options.namespace, memory.block_bytes[0], known)
            self._tier = EngineMemoryTier(options, namespace, memory, options.name or tier_type, _log)
        except BaseException:
            memory.release()
            self._adapters.release(self)
            raise
        owned = self._tier.plane.lower.owned is not None  # of a shared tier no removals are published
        self._tokens_needed = owned and not one_hash_per_key(config)

    # -- lookups -------------------------------------------------------------------------------------------------

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """A request whose keys vLLM will look up."""
        self._tier.plane.begin_request(req_context.req_id)
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        """No further lookups come for this request; its jobs go on."""
        self._tier.plane.end_request(req_context.req_id)

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> VLLMAnswer:
        """HIT: here, and kept until the step ends. RETRY: a lookup in a shared tier is in flight."""
        if not self._keeps_blocks:
            return VLLMAnswer.MISS
        return _ANSWERS[self._tier.lookup(self._ids.to_kvtier(key), req_context.req_id)]

    # -- jobs ----------------------------------------------------------------------------------------------------

    def submit_store(self, job_metadata: VLLMJob) -> None:
        """Begin to store rows that vLLM keeps until the job is reported."""
        if self._keeps_blocks and self._adapters.storable(job_metadata.req_context.req_id):
            self._tier.submit(self._transfer(JobKind.STORE, job_metadata))
        else:
            self._refused.append(job_metadata.job_id)

    def submit_load(self, job_metadata: VLLMJob) -> None:
        """Begin to load into rows that vLLM keeps until the job is reported."""
        self._tier.submit(self._transfer(JobKind.LOAD, job_metadata))

    def _transfer(self, kind: JobKind, job: VLLMJob) -> EngineTransfer:
        """vLLM's job with its blocks in the order of the prefix, where vLLM names that order."""
        keys = list(job.keys)
        positions = [job.req_context.get_offload_key_position(key) for key in keys]
        order: Sequence[int] = range(len(keys))
        if None not in positions:
            order = sorted(order, key=positions.__getitem__)
        named = [self._ids.to_kvtier(keys[i]) for i in order]
        rows = int_array(job.chunk_ids)[list(order)]
        return EngineTransfer(job.job_id, kind, named, rows, job.req_context.req_id, time.monotonic())

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Every job that ended since the last call, each once."""
        finished = [self._result(transfer) for transfer in self._tier.finished()]
        finished += [JobResult(job_id, False) for job_id in self._refused]
        self._refused.clear()
        if not self._events:
            self._loaded.clear()
            self._tier.plane.take_changes()
        return finished

    def _result(self, transfer: EngineTransfer) -> JobResult:
        good = None
        if transfer.kind is JobKind.LOAD:
            self._loaded += transfer.good_keys
        if transfer.kind is JobKind.LOAD and not transfer.ok:
            good = tuple(self._ids.to_vllm(key) for key in transfer.good_keys) or None
        moved = {"transfer_time": transfer.seconds, "transfer_bytes": transfer.bytes_moved}
        return JobResult(transfer.job_id, transfer.ok, good, **moved)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """The step's loads were submitted before this: its hits need not be kept any longer."""
        self._tier.end_step()

    def has_pending_work(self) -> bool:
        """Asked when no job is left: True once more, for the figures."""
        return self._meter.to_read()

    def drain_jobs(self) -> None:
        """Return when nothing touches vLLM's rows any more: jobs that have not ended in time have failed."""
        self._tier.drain()

    def shutdown(self) -> None:
        """Drain within the deadline, release vLLM's memory, then close the tier. Idempotent."""
        self._adapters.release(self)
        self._tier.close()

    # -- events and figures --------------------------------------------------------------------------------------

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Blocks that became reachable on the disk or ceased to be; none unless `enable_kv_events` and vLLM's own are
        set.

        What was loaded is published once more, as removed and stored: vLLM has its tokens, because the step that finds
        the end of a load looks it up behind that.
        """
        if not self._events:
            return
        self._tier.plane.announce(self._loaded, time.monotonic())
        self._loaded.clear()
        for removed, keys in self._tier.plane.take_changes():
            names = [self._ids.to_vllm(key) for key in keys]
            yield OffloadingEvent(names, self.medium, removed, self.locality, removal_expected=self._tokens_needed)

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        """The tier's metrics."""
        return definitions()

    def get_stats(self) -> OffloadingConnectorStats | None:
        """The changes since the last call; once a second."""
        return self._meter.read(self.stats)

    def stats(self) -> StackStats:
        """Figures since the tier was opened; also after a shutdown."""
        return self._tier.stats()


class KVTierSharedFs(KVTierFs):
    """The same over a folder that many engines and hosts share: kvtier's tier `shared_fs`."""

    backend: ClassVar[str] = "shared_fs"

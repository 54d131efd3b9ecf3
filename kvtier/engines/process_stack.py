"""The stack of a synchronous engine that is written in Python, in a process of its own.

The engine's thread and the tiers share no interpreter: a process does all I/O, and a thread beside the engine's copies
between its tensors and shared rows.
"""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import time
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Self

from kvtier.aio.weak_call import weak_call
from kvtier.client.connection import Identity
from kvtier.client.private import PrivateStack
from kvtier.client.stack_client import StackClient
from kvtier.config import StackConfig, load_stack, stack_parts
from kvtier.engines.process_calls import ConnectedStack, ProcessCalls, ProcessRequest, call_of_stack, check_wire_keys
from kvtier.errors import ConfigError, UsageError
from kvtier.stack.assembly import StackParts
from kvtier.stack.jobs import BlockGroup, check_job, new_job, whole_groups
from kvtier.stack.shutdown import CloseReport
from kvtier.stack.watching.stats import StackStats
from kvtier.tier.contract import LookupResult
from kvtier.tier.registry import discover
from kvtier.types.checks import check_hint, check_info, check_text, check_timeout, check_types, check_whole
from kvtier.types.events import OffloadingEvent
from kvtier.types.geometry import Geometry, KVLayout
from kvtier.types.hints import HintResult, KVHint
from kvtier.types.jobs import GPUGroup, JobKind, JobResult, TransferJob
from kvtier.types.keys import GPU, JobId, OffloadKey, RequestId
from kvtier.types.namespace import Namespace
from kvtier.types.requests import RequestInfo

if TYPE_CHECKING:
    import torch

CLOSE_GRACE_SECONDS = 10.0
_log = logging.getLogger(__name__)


class ProcessStack(ConnectedStack):
    """Use it as `with ProcessStack(parts, socket) as stack`, and call `step` once per engine step from one thread.

    `lookup` says RETRY until an answer of the stack process has come, also for keys in rows; in a step it waits for
    that for a millisecond, once. `locate`, `hint`, `stats`, `reset` and `close` wait for the stack process.
    `has_pending_work` counts the engine's own jobs: the process writes back without being stepped. What a load asks for
    is cut to what is worth a load where the stack file names a speed of prefills, so `worth_loading` is the number of
    its keys.

    If the stack process ends, every lookup is a miss and stores are dropped until this engine is connected to the next
    one, which is started where it is private. In a child forked from the process that
    opened it every call raises UsageError, but `close`, which does nothing.
    """

    def __init__(
        self, parts: StackParts, process: Callable[[], PrivateStack | str], *, reads_only: bool = False
    ) -> None:
        """`parts` with the tensors and a GPU tier. `process` is called by `open`, which starts a private stack process
        unless it is there; the socket of another one is that of a process that serves already. With `reads_only`
        nothing is stored."""
        super().__init__()
        self.close_report: CloseReport | None = None
        self._parts = parts
        self._settings = parts.settings
        self._process = process
        self._reads_only = reads_only
        self._stats: StackStats | None = None
        self._next_job = 1
        self._at_exit = weak_call(self._close_at_exit)

    def __del__(self) -> None:
        if self._client is not None and self.close_report is None and not self._owner.is_forked_child:
            warnings.warn(f"unclosed {self!r}", ResourceWarning, stacklevel=1, source=self)

    # -- life ----------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def open(self) -> None:
        """Connect to the stack process, which is started unless it is there, and wait until it serves this engine.

        Raises ConfigError or ResourceError, with nothing left behind, if it does not.
        """
        self._owner.check()
        if self._client is not None or self._closing:
            raise UsageError("a stack is opened once")
        gpu, tensors = self._parts.tiers[0], self._parts.kv_caches
        if tensors is None or gpu.medium != GPU:
            raise UsageError("a stack in a process of its own is opened with the engine's tensors")
        if others := {tensor.device.type for tensor in tensors} - {"cpu", "cuda"}:
            raise ConfigError(f"a stack process serves tensors in host memory or on CUDA, not on {min(others)}")
        self._owner.claim()
        process = self._process()
        private = process if isinstance(process, PrivateStack) else None
        if private is not None:
            private.start()
        path = process if isinstance(process, str) else process.path
        parts = self._parts
        identity = Identity(path, parts.namespace, parts.engine_id, secrets.token_hex(16), private, self._reads_only)
        self._client = StackClient(identity, tensors, gpu)
        atexit.register(self._at_exit)

    def close(self) -> CloseReport:
        """End all jobs and leave the stack process. Idempotent; in a forked child it does nothing.

        GPU blocks of its jobs are the engine's own again when this returns, unless the report counts unfinished jobs. A
        private process that serves no other engine drains lower tiers until the closing deadline and closes every tier
        before. One that is shared goes on, and nothing is lost.
        """
        if self._owner.is_forked_child:
            return CloseReport(0, 0)
        client, self._closing = self._client, True
        if client is None or self.close_report is not None:
            return self.close_report or CloseReport(0, 0)
        atexit.unregister(self._at_exit)
        dropped = unfinished = 0
        try:
            if self._in_call:  # in a signal handler, in the middle of another call
                client.cut()
            else:
                self._stats = self._read_stats(client)
                seconds = self._settings.close_timeout_seconds + self._settings.tier_close_seconds
                dropped, unfinished = client.leave(seconds + CLOSE_GRACE_SECONDS)
        finally:
            self.close_report = CloseReport(dropped, unfinished)
            if not self._in_call:
                client.close()
        if dropped or unfinished:
            _log.warning("closed: %d blocks were dropped, %d jobs did not end", dropped, unfinished)
        return self.close_report

    def _close_at_exit(self) -> None:
        """End the copies of a stack that was left open when the interpreter ends. The process writes back by itself."""
        client = self._client
        if client is not None and self.close_report is None and not self._owner.is_forked_child:
            self._closing = True
            self.close_report = CloseReport(0, client.transfers.copies)
            client.close()
            text = f"{self!r} was closed by the end of the program; close it before"
            warnings.warn(text, ResourceWarning, stacklevel=1)

    # -- moving blocks -------------------------------------------------------------------------------------------

    def job(self, kind: JobKind, groups: Sequence[GPUGroup], timeout_seconds: float | None = None) -> TransferJob:
        """A job with a fresh id and a deadline from now; the stack's own default when no timeout is given."""
        self._opened()
        job = new_job(self._next_job, kind, groups, timeout_seconds, self._settings, time.monotonic())
        self._next_job += 1
        return job

    def submit_store(
        self,
        keys: Sequence[OffloadKey] = (),
        *,
        gpu_blocks: Sequence[int] = (),
        groups: Sequence[BlockGroup] = (),
        timeout_seconds: float | None = None,
    ) -> JobId:
        """Begin to store whole blocks, named as for `TierStack.store`; the result comes out of a later `step`."""
        found = whole_groups(keys, gpu_blocks, groups, self._opened().geometry)
        return self.submit(self.job(JobKind.STORE, found, timeout_seconds))

    def submit_load(
        self,
        keys: Sequence[OffloadKey] = (),
        request: ProcessRequest | None = None,
        *,
        gpu_blocks: Sequence[int] = (),
        groups: Sequence[BlockGroup] = (),
        timeout_seconds: float | None = None,
    ) -> JobId:
        """Begin to load whole blocks, named as for `TierStack.load`; the result comes out of a later `step`."""
        found = whole_groups(keys, gpu_blocks, groups, self._opened().geometry)
        return self.submit(self.job(JobKind.LOAD, found, timeout_seconds), request)

    @call_of_stack
    def submit(self, job: TransferJob, request: ProcessRequest | None = None) -> JobId:
        """Begin a prepared job; its result comes out of a later `step`. Returns the job's id.

        A load that names a request ends the request's leases. Raises UsageError for a job that contradicts the layout.
        """
        client = self._client
        assert client is not None
        check_job(job, client.geometry)
        if self._reads_only and job.kind is JobKind.STORE:
            raise UsageError("this engine only reads: nothing is stored")
        for group in job.groups:
            check_wire_keys(group.keys)
        if request is not None:
            check_types("a job's request", (request, ProcessRequest))
        client.begin_job(job, None if request is None else request._request)
        return job.job_id

    @call_of_stack
    def cancel(self, job_id: JobId) -> None:
        """End a job early; its result still comes, after the copies in flight."""
        check_whole("a job's id", job_id)
        self._opened().transfers.cancel(job_id)

    @call_of_stack
    def step(self) -> list[JobResult]:
        """Once per engine step: take in what came, send what was decided, return the engine's jobs that ended."""
        client = self._client
        assert client is not None
        return client.step()

    def wait(self, timeout_seconds: float) -> bool:
        """For an engine with nothing else to do: wait until `step` has work, or the time is over.

        `step` has work when something arrived, or by time alone. True unless the time was over first.
        """
        check_timeout(timeout_seconds)
        return self._opened().wait(timeout_seconds)

    def wake(self) -> None:
        """From any thread, while the stack is open: have `wait` return."""
        self._opened().wake()

    @property
    def has_pending_work(self) -> bool:
        """True while an engine that idles should go on stepping: its jobs are in flight or wait."""
        return self._opened().has_pending_work

    # -- lookups, requests, hints --------------------------------------------------------------------------------

    @call_of_stack
    def lookup(self, keys: Sequence[OffloadKey], *, ask: bool = True) -> list[LookupResult]:
        """Presence of each key; RETRY until the stack process has answered, or a shared tier. No tier is asked without
        `ask`. A HIT is in a row, and may be gone when it is loaded: `reserve` of a request keeps it."""
        check_types("ask", (ask, bool))
        return self._client_for(keys).look(keys, ask)

    @call_of_stack
    def request(
        self,
        request_id: RequestId,
        keys: Sequence[OffloadKey] | None = None,
        *,
        info: RequestInfo | None = None,
        time: float | None = None,
    ) -> ProcessRequest:
        """A request of the engine that uses these keys, each group's from its first block on, in prefix order.

        Make it before the request's loads and stores. Without keys it begins when it is extended. Raises UsageError if
        a time is given: policies go by the clock of the stack process.
        """
        client = self._opened() if keys is None else self._client_for(keys)
        check_text("a request's id", request_id)
        if request_id.startswith("\0"):
            raise UsageError("a request's id does not begin with a zero byte")
        if info is not None:
            check_info(info)
        if time is not None:
            raise UsageError("the time of a request is the stack process's own; `open_stack` takes one")
        request = ProcessRequest(self, client.core.request(client.core.free_id(request_id), (), info))
        if keys is not None:
            request._extend(keys)
        return request

    @call_of_stack
    def locate(self, keys: Sequence[OffloadKey]) -> list[str | None]:
        """For each key the name of the highest tier that holds it, or None. Waits for the stack process."""
        return self._client_for(keys).locate(keys)

    @call_of_stack
    def hint(self, hint: KVHint) -> HintResult:
        """Follow what the application says of blocks: `Retain`, `Pin`, `Prefetch`, `Demote` or `Release`.

        Waits for the stack process; STOPPED if that does not answer. Raises UsageError for a hint that is none.
        """
        client = self._opened()
        check_hint(hint, client.geometry.num_groups)
        check_wire_keys(getattr(hint, "keys", ()))
        return client.hint(hint)

    # -- figures, events, resets ---------------------------------------------------------------------------------

    @property
    def geometry(self) -> Geometry:
        """The layout in rows of the stack's alignment."""
        return self._opened().geometry

    @property
    def engine(self) -> ProcessCalls:
        """The calls for engine adapters alone."""
        return ProcessCalls(self)

    def stats(self) -> StackStats:
        """Figures of every tier since the stack process opened them, for all its engines. Waits for them; the last ones
        if they do not come, also after it closed."""
        self._owner.check()
        client = self._client
        if client is None:
            raise UsageError("the stack was never opened")
        if not self._closing:
            self._stats = self._take_stats()
        return self._stats or StackStats({}, 0)

    @call_of_stack
    def _take_stats(self) -> StackStats | None:
        return self._read_stats(self._opened())

    def _read_stats(self, client: StackClient) -> StackStats | None:
        document = client.figures()
        if not document:
            return self._stats
        from kvtier.stack.watching.stats_socket import stats_from_document

        return stats_from_document(document, client.events.lost)

    @call_of_stack
    def take_events(self) -> list[OffloadingEvent]:
        """Take the blocks that became reachable or ceased to be since the last call, in order.

        The first call has the stack process send them, from what the tiers have then on.
        """
        return self._opened().take_events()

    @call_of_stack
    def reset(self, timeout_seconds: float = 30.0) -> None:
        """New weights: everything stored before is unreachable in every tier when this returns, also after a crash.

        Raises ResourceError if a tier could not make that durable in time; in memory it holds all the same.
        """
        check_timeout(timeout_seconds)
        self._opened().reset(timeout_seconds)

    def check_integrity(self) -> None:
        """Raise IntegrityError unless the sums of this engine's jobs and leases agree. For tests and for suspicions."""
        self._owner.check()
        if self._client is not None:
            self._client.transfers.check_integrity()


def open_engine_stack(
    stack: str | os.PathLike[str] | StackConfig,
    layout: KVLayout | Namespace,
    tensors: Sequence[torch.Tensor],
    *,
    model: str = "",
    engine_id: str = "",
) -> ProcessStack:
    """A stack for a synchronous engine, for `with`: the arguments are those of `open_stack`.

    It is in a process of its own, which is started unless it is there; engines of this user with the same stack file
    share one. Opening it raises ConfigError for tensors that are neither in host memory nor on CUDA.
    """
    config = stack if isinstance(stack, StackConfig) else load_stack(stack)
    parts = stack_parts(config, layout, tensors, engine_id=engine_id, model=model)
    text = config.model_dump_json(exclude_unset=True)
    return ProcessStack(parts, lambda: PrivateStack(text, config.runtime_dir))


def connect_engine_stack(
    service: str | os.PathLike[str],
    namespace: Namespace,
    tensors: Sequence[torch.Tensor],
    *,
    engine_id: str = "",
    reads_only: bool = False,
) -> ProcessStack:
    """The stack of a `kvtier serve`, for `with`: `service` is its socket, `tensors` hold the engine's GPU blocks.

    Engines of one namespace find each other's blocks. The tiers are those of the service's stack file; so is the tag of
    the namespace if that names one: an engine with another tag is refused. `engine_id` is a name for `kvtier engines`.
    An engine that `reads_only` stores nothing, and maps rows in host memory so that it cannot write them.
    Opening it raises ResourceError if no stack process answers, ConfigError if it does not serve this engine.
    """
    gpu = discover().get("gpu")
    parts = StackParts([gpu(gpu.Options(type="gpu"))], namespace, tensors, engine_id=engine_id)
    return ProcessStack(parts, lambda: os.path.abspath(service), reads_only=reads_only)

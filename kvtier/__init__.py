"""kvtier: a tiered storage engine for the KV cache of LLM serving.

An embedder imports this module alone; `docs/api.md` lists its names. They are loaded at their first use, so that
importing `kvtier`, as the command line does, loads neither torch nor numpy.
"""

from importlib import import_module, metadata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtier.config import StackConfig, load_stack, open_stack, parse_stack
    from kvtier.engines.process_calls import ProcessCalls, ProcessRequest, ProcessReservation
    from kvtier.engines.process_stack import ProcessStack, connect_engine_stack, open_engine_stack
    from kvtier.errors import ConfigError, GeometryError, IntegrityError, KVTierError, ResourceError, UsageError
    from kvtier.metrics import metric_families
    from kvtier.stack import CloseReport, StackStats, TierStack, TierStats
    from kvtier.stack.engine_calls import EngineCalls
    from kvtier.stack.request import StackRequest
    from kvtier.tier.contract import LookupResult
    from kvtier.types.events import OffloadingEvent
    from kvtier.types.geometry import GroupKind, GroupLayout, KVLayout, TensorRef
    from kvtier.types.gpu_runs import GPURuns
    from kvtier.types.hints import Demote, HintRefusal, HintResult, Pin, Prefetch, Release, Retain
    from kvtier.types.jobs import BlockOutcome, BlockStatus, DropReason, GPUGroup, JobKind, JobResult, TransferJob
    from kvtier.types.keys import OffloadKey, RequestId, block_keys
    from kvtier.types.namespace import Namespace
    from kvtier.types.requests import RequestInfo

    __version__: str

_NAMES = {
    "kvtier.config": "StackConfig load_stack open_stack parse_stack",
    "kvtier.engines.process_calls": "ProcessCalls ProcessRequest ProcessReservation",
    "kvtier.engines.process_stack": "ProcessStack connect_engine_stack open_engine_stack",
    "kvtier.errors": "ConfigError GeometryError IntegrityError KVTierError ResourceError UsageError",
    "kvtier.metrics": "metric_families",
    "kvtier.stack": "CloseReport StackStats TierStack TierStats",
    "kvtier.stack.engine_calls": "EngineCalls",
    "kvtier.stack.request": "StackRequest",
    "kvtier.tier.contract": "LookupResult",
    "kvtier.types.events": "OffloadingEvent",
    "kvtier.types.geometry": "GroupKind GroupLayout KVLayout TensorRef",
    "kvtier.types.gpu_runs": "GPURuns",
    "kvtier.types.hints": "Demote HintRefusal HintResult Pin Prefetch Release Retain",
    "kvtier.types.jobs": "BlockOutcome BlockStatus DropReason GPUGroup JobKind JobResult TransferJob",
    "kvtier.types.keys": "OffloadKey RequestId block_keys",
    "kvtier.types.namespace": "Namespace",
    "kvtier.types.requests": "RequestInfo",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}
"""Where each public name is defined."""

__all__ = ["__version__"]  # type checkers read only literals
__all__ += ["StackConfig", "load_stack", "open_stack", "parse_stack"]
__all__ += ["ProcessCalls", "ProcessRequest", "ProcessReservation"]
__all__ += ["ProcessStack", "connect_engine_stack", "open_engine_stack"]
__all__ += ["ConfigError", "GeometryError", "IntegrityError", "KVTierError", "ResourceError", "UsageError"]
__all__ += ["metric_families"]
__all__ += ["CloseReport", "StackStats", "TierStack", "TierStats"]
__all__ += ["EngineCalls", "StackRequest"]
__all__ += ["LookupResult"]
__all__ += ["OffloadingEvent"]
__all__ += ["GroupKind", "GroupLayout", "KVLayout", "TensorRef"]
__all__ += ["GPURuns"]
__all__ += ["Demote", "HintRefusal", "HintResult", "Pin", "Prefetch", "Release", "Retain"]
__all__ += ["BlockOutcome", "BlockStatus", "DropReason", "GPUGroup", "JobKind", "JobResult", "TransferJob"]
__all__ += ["OffloadKey", "RequestId", "block_keys"]
__all__ += ["Namespace"]
__all__ += ["RequestInfo"]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """A public name, loaded at its first use."""
        if name == "__version__":
            value = metadata.version("kvtier")
        elif name in _MODULES:
            value = getattr(import_module(_MODULES[name]), name)
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})

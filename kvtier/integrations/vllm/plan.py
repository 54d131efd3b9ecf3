"""What scheduler and workers derive, each for itself, from the same configuration: stack, layout, namespace."""

from __future__ import annotations

from dataclasses import dataclass

from vllm.v1.kv_offload.config import OffloadingConfig

from kvtier.config import StackConfig
from kvtier.integrations.vllm import settings
from kvtier.namespace import Namespace


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """One engine's stack. `engine_id` names its shared region; `group_ids[position]` is vLLM's own id of a group."""

    stack: StackConfig
    namespace: Namespace
    engine_id: str
    group_ids: tuple[int, ...]


def engine_plan(config: OffloadingConfig) -> EnginePlan:
    """Derive the plan; no I/O but reading the stack file. Raises ConfigError."""
    settings.check_parallel(config)
    stack = settings.stack_config(config)
    group_ids = tuple(group.group_id for group in config.groups)
    return EnginePlan(stack, settings.namespace(config, stack), config.engine_id, group_ids)

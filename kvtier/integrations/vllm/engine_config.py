"""What is in vLLM's whole configuration of an engine and not in what a connector or a tier is given."""

import gc

from vllm.config import VllmConfig
from vllm.v1.kv_offload.config import OffloadingParallelConfig

from kvtier.errors import ConfigError


def engine_config(engine_id: str) -> VllmConfig | None:
    """vLLM's configuration of the engine of this id, looked for among all objects; takes about 0.1 s.

    A draft model has a copy of it, with the parallelism of the draft. None outside vLLM.
    """
    found = [
        config
        for config in gc.get_objects()
        if type(config) is VllmConfig
        and config.kv_transfer_config is not None
        and config.kv_transfer_config.engine_id == engine_id
    ]
    return max(found, key=_launched_engines, default=None)


def engine_share(parallel: OffloadingParallelConfig, config: VllmConfig | None) -> tuple[int, int]:
    """The index of this engine among all that were launched with it, and their number: they share one stack file.

    Raises ConfigError where vLLM hides the number.
    """
    index = parallel.data_parallel_index
    engines = max(parallel.data_parallel_size, 1 if config is None else _launched_engines(config))
    if index >= engines:
        raise ConfigError(
            f"is hidden by this vLLM: this is engine {index} of an unknown number, so it cannot have its share of the "
            "bounds; start independent engines, each with a stack file of its own",
            "data_parallel_size",
        )
    return index, engines


def _launched_engines(config: VllmConfig) -> int:
    """How many engines were launched, or the number to which they may be scaled.

    vLLM makes each data-parallel rank of a dense model an engine by itself, whose `data_parallel_size` is 1. It leaves
    the number of the launch in this field, also where nothing is elastic.
    """
    return getattr(config.parallel_config, "elastic_ep_max_dp_size", None) or 1

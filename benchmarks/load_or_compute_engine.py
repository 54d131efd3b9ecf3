"""The engine of `benchmarks.load_or_compute`: a real vLLM in a process of its own, its model in the same process."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from typing import Any

from benchmarks.peer import serve
from benchmarks.vllm_processes import SlowService, slow_service

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}
SHAPE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 8192,
    "dtype": "float32",
}


class Engine:
    """One vLLM. What is asked of it comes as JSON."""

    def __init__(self) -> None:
        os.environ.update(ENVIRONMENT)
        self._llm: Any = None
        self._tokens_per_second = 0.0
        self._open = ExitStack()
        self._service: SlowService | None = None

    def make(self, model: str) -> dict[str, Any]:
        """A random model in a new folder: much KV cache for little computing."""
        from transformers import LlamaConfig, LlamaForCausalLM

        LlamaForCausalLM(LlamaConfig(**SHAPE)).save_pretrained(model)
        return {}

    def start(self, model: str, stack: dict[str, Any] | None) -> dict[str, Any]:
        """Start vLLM, with kvtier where a stack is given."""
        from vllm import LLM
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner

        connector = {"spec_name": "KVTierSpec", "spec_module_path": "kvtier.engines.vllm", "stack": stack}
        if stack is not None:
            self._service = self._open.enter_context(slow_service(stack, "slow_bytes"))
            connector["service"] = self._service.path
        roles = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": connector}
        self._slow_prefill(GPUModelRunner)
        self._llm = LLM(
            model, enforce_eager=True, dtype="float32", max_model_len=4096, skip_tokenizer_init=True,
            kv_transfer_config=roles if stack is not None else None,
        )  # fmt: skip
        return {}

    def prefill(self, tokens_per_second: float) -> dict[str, Any]:
        """From here on the model computes no faster than this; 0: as fast as it can."""
        self._tokens_per_second = tokens_per_second
        return {}

    def disk(self, bytes_per_second: float) -> dict[str, Any]:
        """From here on loads of the disk end no sooner than this, one after another; 0: as soon as they can."""
        assert self._service is not None
        self._service.tell(bytes_per_second)
        return {}

    def ask(self, prompt: list[int]) -> dict[str, Any]:
        """The time to the first token of a prompt that vLLM's own cache does not have, and the tokens from kvtier."""
        from vllm import SamplingParams

        settings = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
        assert self._llm.reset_prefix_cache()
        begun, cpu = time.perf_counter(), time.process_time()
        output = self._llm.generate([{"prompt_token_ids": prompt}], settings, use_tqdm=False)[0]
        seconds, cpu = time.perf_counter() - begun, time.process_time() - cpu
        cached, token = output.num_cached_tokens or 0, output.outputs[0].token_ids[0]
        return {"seconds": seconds, "cpu_seconds": cpu, "cached": cached, "token": token}

    def end(self) -> dict[str, Any]:
        """Close what was started."""
        self._llm.llm_engine.engine_core.shutdown()
        self._open.close()
        return {}

    def _slow_prefill(self, runner: Any) -> None:
        execute = runner.execute_model

        def slow(this: Any, scheduled: Any, *more: Any, **named: Any) -> Any:
            begun = time.perf_counter()
            result = execute(this, scheduled, *more, **named)
            if self._tokens_per_second:
                due = begun + scheduled.total_num_scheduled_tokens / self._tokens_per_second
                time.sleep(max(0.0, due - time.perf_counter()))
            return result

        runner.execute_model = slow


if __name__ == "__main__":
    engine = Engine()
    serve({name: getattr(engine, name) for name in ("make", "start", "prefill", "disk", "ask", "end")})

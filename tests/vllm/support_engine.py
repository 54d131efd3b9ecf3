"""One vLLM engine in a process of its own: `python support_engine.py CONFIG_JSON FD`; commands are lines of JSON.

`{"do": "generate", "prompts": [[...], ...], "tokens": 8}` answers tokens, cached tokens and seconds of each prompt,
with the LoRA adapter of a folder where `"adapter": "/its/folder"` names one;
`{"do": "reset", "tiers": false}` empties vLLM's prefix cache, and the tiers too when asked; `{"do": "metrics"}`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any


def main(config: dict[str, Any], answers: int) -> None:
    os.environ.update(
        VLLM_CPU_KVCACHE_SPACE="1", HF_HUB_OFFLINE="1", VLLM_CPU_OMP_THREADS_BIND="nobind", VLLM_NO_USAGE_STATS="1"
    )
    from prometheus_client import REGISTRY
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    from kvtier.integrations.vllm.metrics import INTERVAL_SECONDS

    llm = LLM(**{"enforce_eager": True, "dtype": "float32", **config})

    def generate(prompts: list[list[int]], tokens: int, adapter: str | None = None) -> dict[str, Any]:
        settings = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        lora = LoRARequest("adapter", 1, adapter) if adapter else None
        begun = time.perf_counter()
        outputs = llm.generate(asked, settings, use_tqdm=False, lora_request=lora)
        return {
            "seconds": time.perf_counter() - begun,
            "tokens": [list(output.outputs[0].token_ids) for output in outputs],
            "cached": [output.num_cached_tokens or 0 for output in outputs],
        }

    def metrics() -> dict[str, float]:
        time.sleep(1.1 * INTERVAL_SECONDS)  # an engine that steps once an interval later tells what is untold yet
        generate([[1, 2, 3]], 2)
        found: dict[str, float] = {}
        for metric in REGISTRY.collect():  # what /metrics shows; get_metrics() shows vLLM's own names alone
            for sample in metric.samples:
                if sample.name.startswith("kvtier_") or "offload" in sample.name:
                    labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))
                    found[f"{sample.name}{{{labels}}}"] = sample.value
        return found

    with os.fdopen(answers, "w") as out:
        print(json.dumps({"ready": True}), file=out, flush=True)
        for line in sys.stdin:
            asked = json.loads(line)
            match asked.pop("do"):
                case "generate":
                    answer: Any = generate(**asked)
                case "reset":
                    answer = llm.reset_prefix_cache(reset_connector=asked["tiers"])
                case "metrics":
                    answer = metrics()
                case other:
                    raise ValueError(other)
            print(json.dumps(answer), file=out, flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), int(sys.argv[2]))

"""One vLLM engine in a process of its own; questions come through a pipe, each is answered.

`{"do": "generate", "prompts": [[...], ...], "tokens": 8}` answers tokens, cached tokens and seconds of each prompt,
with the LoRA adapter of a folder where `"adapter": "/its/folder"` names one, with a cache salt (`"salt": "a tenant"`),
and with hints of kvtier (`"hints": [["retain", {"seconds": 300.0}]]`), in vLLM's envelope or, with `"http": true`, as
HTTP requests say them;
`{"do": "embed", "prompts": [[...], ...]}` answers the values of each embedding as log-probabilities;
`{"do": "reload", "weights": "/a/model"}` replaces the weights, `{"do": "flip"}` the embedding, unknown to vLLM;
`{"do": "listen", "prompts": [[1, "<|audio|> w3"], ...]}` is as the first, with a second of noise drawn by each number;
`{"do": "load_in_place", "adapter": "/its/folder"}` has the workers read its files again;
`{"do": "block_size"}` answers the tokens of a GPU block;
`{"do": "reset", "tiers": false}` empties vLLM's prefix cache, and the tiers too when asked; `{"do": "metrics"}`;
`{"do": "page", "accept": "text/plain"}` answers vLLM's own page of metrics and its content type.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
import uuid
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from fastapi import FastAPI
from prometheus_client import REGISTRY
from vllm import LLM, SamplingParams
from vllm.entrypoints.serve.instrumentator.metrics import attach_router
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope
from vllm.v1.request import RequestStatus

from benchmarks.vllm_processes import fork_processes
from kvtier.engines.digests import ContentDigests, FileState
from kvtier.engines.vllm.primary.worker import KVTierWorker

RATE = 16000
"""Values of sound a second."""
Hints = Sequence[tuple[str, dict[str, Any]]]
"""Names of hints, and what they say."""


def main(config: dict[str, Any], questions: Connection) -> None:
    """Start an engine, say so, answer until the other end of the pipe is closed, shut the engine down.

    Packages of the folder that `site` names are as if they were installed. Digests of files are not computed before the
    file exists that `digests_after` names. The file that `loads_noted` names gets a word for each load: `within` the
    step or `between` two, and `waiting` for each step that leaves requests waiting for one. `without` names a
    protection of `support_protections_engine` that is turned off. With `mamba_in_steps` a prompt's last state of Mamba
    2 is stored at the end of a step, which on a CPU vLLM cannot store within one.
    """
    if site := config.pop("site", None):
        sys.path.insert(0, site)
    if noted := config.pop("loads_noted", None):
        note_loads(Path(noted))
    if gate := config.pop("digests_after", None):
        wait_with_digests(Path(gate))
    if protection := config.pop("without", None):
        turn_off(protection)
    if config.pop("mamba_in_steps", False):
        compute_mamba_in_steps()
    if os.environ.get("VLLM_WORKER_MULTIPROC_METHOD") != "spawn":
        fork_processes()
    llm = LLM(**{"enforce_eager": True, "dtype": "float32", **config})

    def generate(
        prompts: list[list[int]],
        tokens: int,
        adapter: str | None = None,
        hints: Hints = (),
        http: bool = False,
        store: int | None = None,
        salt: str = "",
    ) -> dict[str, Any]:
        settings = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=0)
        if store is not None:
            settings.extra_args = {"kv_transfer_params": {"max_offload_tokens": store}}
        if hints and http:
            said = [{"action_type": f"kvtier.{name}", "payload": payload} for name, payload in hints]
            settings.extra_args = {"kv_transfer_params": {"kvtier_hints": said}}
        asked = inputs(prompts, salt)
        lora = LoRARequest("adapter", 1, adapter) if adapter else None
        begun = time.perf_counter()
        if hints and not http:
            outputs = generate_hinted(llm, asked, settings, hints)
        else:
            outputs = llm.generate(asked, settings, use_tqdm=False, lora_request=lora)
        return answer_of(outputs, begun)

    def listen(prompts: list[tuple[int, str]], tokens: int) -> dict[str, Any]:
        noise = [np.random.default_rng(seed).standard_normal(RATE).astype(np.float32) for seed, _ in prompts]
        asked = [
            {"prompt": text, "multi_modal_data": {"audio": (sound, RATE)}}
            for sound, (_, text) in zip(noise, prompts, strict=True)
        ]
        settings = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=0)
        return answer_of(llm.generate(asked, settings, use_tqdm=False), time.perf_counter())

    def embed(prompts: list[list[int]], tokens: int) -> dict[str, Any]:
        begun = time.perf_counter()
        outputs = llm.embed(inputs(prompts), use_tqdm=False)
        return {
            "seconds": time.perf_counter() - begun,
            "tokens": [[] for _ in outputs],
            "logprobs": [list(output.outputs.embedding) for output in outputs],
            "cached": [output.num_cached_tokens for output in outputs],
            "lengths": [len(output.prompt_token_ids) for output in outputs],
        }

    def settle() -> None:
        """Wait until the engine has nothing to do, and take in all that it said."""
        core = llm.llm_engine.engine_core
        while core.call_utility("has_work"):
            pass
        while not core.outputs_queue.empty():
            llm.llm_engine.step()

    def metrics() -> dict[str, float]:
        settle()
        found: dict[str, float] = {}
        for metric in REGISTRY.collect():  # what /metrics shows; get_metrics() shows vLLM's own names alone
            for sample in metric.samples:
                if sample.name.startswith("kvtier_") or "offload" in sample.name or "preemptions" in sample.name:
                    labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))
                    found[f"{sample.name}{{{labels}}}"] = sample.value
        return found

    app = FastAPI()
    attach_router(app)

    def page(accept: str) -> tuple[str, str]:
        settle()
        found = asyncio.run(fetch(app, accept))
        return found.text, found.headers["content-type"]

    questions.send({"ready": True})
    while True:
        try:
            asked = questions.recv()
        except EOFError:
            break
        match asked.pop("do"):
            case "generate":
                answer: Any = generate(**asked)
            case "listen":
                answer = listen(**asked)
            case "embed":
                answer = embed(**asked)
            case "reload":
                answer = llm.collective_rpc("reload_weights", kwargs={"weights_path": asked["weights"]})
            case "flip":
                answer = llm.collective_rpc(flip_embedding)
            case "load_in_place":
                answer = llm.llm_engine.add_lora(LoRARequest("adapter", 1, asked["adapter"], load_inplace=True))
            case "reset":
                answer = llm.reset_prefix_cache(reset_connector=asked["tiers"])
            case "metrics":
                answer = metrics()
            case "block_size":
                answer = llm.llm_engine.vllm_config.cache_config.block_size
            case "page":
                answer = page(**asked)
            case other:
                raise ValueError(other)
        questions.send(answer)
    llm.llm_engine.engine_core.shutdown()


def answer_of(outputs: Sequence[RequestOutput], begun: float) -> dict[str, Any]:
    return {
        "seconds": time.perf_counter() - begun,
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "logprobs": [
            [each[token].logprob for token, each in zip(found.token_ids, found.logprobs or (), strict=False)]
            for found in (output.outputs[0] for output in outputs)
        ],
        "cached": [output.num_cached_tokens or 0 for output in outputs],
        "lengths": [len(output.prompt_token_ids or ()) for output in outputs],
    }


def inputs(prompts: list[list[int]], salt: str = "") -> list[Any]:
    """Prompts as vLLM takes them."""
    return [{"prompt_token_ids": prompt, **({"cache_salt": salt} if salt else {})} for prompt in prompts]


def generate_hinted(llm: LLM, asked: list[Any], settings: SamplingParams, hints: Hints) -> list[RequestOutput]:
    """As `LLM.generate`, which takes no hints."""
    actions = [KvHintAction(str(number), f"kvtier.{name}", "1", said) for number, (name, said) in enumerate(hints)]
    engine = llm.llm_engine
    names = [uuid.uuid4().hex for _ in asked]
    for name, prompt in zip(names, asked, strict=True):
        engine.add_request(name, prompt, settings, kv_hints=KvHintsEnvelope("1", name, actions))
    ended: dict[str, RequestOutput] = {}
    while engine.has_unfinished_requests():
        ended |= {output.request_id: output for output in engine.step() if output.finished}
    return [ended[name] for name in names]


async def fetch(app: FastAPI, accept: str) -> httpx.Response:
    """The page of metrics of vLLM's server."""
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://vllm") as client:
        return await client.get("/metrics", headers={"Accept": accept})


def flip_embedding(worker: Any) -> None:
    """Write into the memory of the weights, as an extension of the workers may."""
    weight = next(tensor for name, tensor in worker.get_model().named_parameters() if "embed_tokens" in name)
    weight.data.copy_(weight.data.flip(0))


def compute_mamba_in_steps() -> None:
    from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2  # here, because few engines need it

    MambaMixer2.get_kv_cache_spec = super(MambaMixer2, MambaMixer2).get_kv_cache_spec  # type: ignore[method-assign]


def turn_off(protection: str) -> None:
    import pytest  # here, because few engines need it
    import support_protections_engine

    getattr(support_protections_engine, protection)(pytest.MonkeyPatch())


def note_loads(noted: Path) -> None:
    submit, schedule = KVTierWorker.submit_load, Scheduler.schedule

    def note(word: str) -> None:
        with noted.open("a") as file:
            file.write(f"{word}\n")

    def submit_noted(self: KVTierWorker, job_id: int, source: Any, target: Any, expedited: bool = False) -> bool:
        note("within" if expedited else "between")
        return submit(self, job_id, source, target, expedited)

    def schedule_noted(self: Scheduler, *given: Any, **named: Any) -> Any:
        output = schedule(self, *given, **named)
        if any(one.status is RequestStatus.WAITING_FOR_REMOTE_KVS for one in self.requests.values()):
            note("waiting")
        return output

    KVTierWorker.submit_load, Scheduler.schedule = submit_noted, schedule_noted  # type: ignore[method-assign]


def wait_with_digests(gate: Path) -> None:
    read = ContentDigests._read

    def late(self: ContentDigests, state: FileState) -> str:
        while not gate.exists() and not self._cancelled.is_set():
            time.sleep(0.05)
        return read(self, state)

    ContentDigests._read = late  # type: ignore[method-assign]

"""The process of data-parallel engines: as `support_engine.main`, over vLLM's asynchronous front end."""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from multiprocessing.connection import Connection
from typing import Any

from support_engine import fork_processes
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM


def main(config: dict[str, Any], questions: Connection) -> None:
    """Answer `generate`, by the engine `rank`, until the other end is closed."""
    if os.environ.get("VLLM_WORKER_MULTIPROC_METHOD") != "spawn":
        fork_processes()
    asyncio.run(_serve(config, questions))


async def _serve(config: dict[str, Any], questions: Connection) -> None:
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**{"enforce_eager": True, "dtype": "float32", **config}))
    settings = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)

    async def one(prompt: list[int], rank: int) -> Any:
        asked = {"prompt_token_ids": prompt}
        return [out async for out in llm.generate(asked, settings, uuid.uuid4().hex, data_parallel_rank=rank)][-1]

    try:
        questions.send({"ready": True})
        while (asked := await asyncio.to_thread(_next, questions)) is not None:
            begun = time.perf_counter()
            outputs = await asyncio.gather(*(one(prompt, asked["rank"]) for prompt in asked["prompts"]))
            answer = {
                "seconds": time.perf_counter() - begun,
                "tokens": [list(output.outputs[0].token_ids) for output in outputs],
                "cached": [output.num_cached_tokens or 0 for output in outputs],
            }
            questions.send(answer)
    finally:
        llm.shutdown()


def _next(questions: Connection) -> dict[str, Any] | None:
    try:
        return questions.recv()
    except EOFError:
        return None

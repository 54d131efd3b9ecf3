"""Real vLLM servers at one `kvtier serve`, which goes on without them, and is started again under one of them."""

from __future__ import annotations

import time

import pytest
import yaml
from engines import ANSWER_SECONDS, BLOCK, engine
from support_service import end, stack_process
from test_process_replicas import BLOCKS, asked, cpu_only, store

pytestmark = [pytest.mark.engine, pytest.mark.timeout(3600)]
PROMPTS = 12


def test_servers_that_come_and_go_share_a_service_and_outlive_it(models, root, tmp_path, short_folder):
    prompts, path, file = asked(PROMPTS), f"{short_folder}/service", tmp_path / "stack.yaml"
    file.write_text(yaml.safe_dump(cpu_only(100, short_folder, root)))
    config = {"connector": {"service": path}, "max_model_len": 2048}
    with stack_process(file, path) as service:
        with engine(models["llama"], tmp_path, **config) as first:
            computed = store(first, prompts)
        assert sum(computed.cached) == 0
        with engine(models["llama"], tmp_path, **config) as second:
            found = second.generate(prompts)
            assert (found.tokens, found.cached) == (computed.tokens, [BLOCKS * BLOCK] * PROMPTS)
            end(service)
            second.reset()
            gone = second.generate(prompts)
            assert (gone.tokens, sum(gone.cached)) == (computed.tokens, 0)
            with stack_process(file, path):
                until = time.monotonic() + ANSWER_SECONDS
                while True:  # it connects again with a step, and computes what it stores
                    second.reset()
                    again = second.generate(prompts)
                    assert again.tokens == computed.tokens
                    if again.cached == [BLOCKS * BLOCK] * PROMPTS:
                        break
                    assert time.monotonic() < until, again.cached


def test_a_server_that_only_reads_hits_what_another_stored_and_stores_nothing(models, root, tmp_path, short_folder):
    prompts, path, file = asked(PROMPTS), f"{short_folder}/service", tmp_path / "stack.yaml"
    file.write_text(yaml.safe_dump(cpu_only(100, short_folder, root)))
    connector = {"service": path}
    reading = {"connector": connector | {"reads_only": True}, "max_model_len": 2048}
    with (
        stack_process(file, path),
        engine(models["llama"], tmp_path, connector=connector, max_model_len=2048) as stores,
        engine(models["llama"], tmp_path, **reading) as reads,
    ):
        assert sum(reads.generate(prompts).cached) == 0
        reads.reset()
        assert sum(reads.generate(prompts).cached) == 0  # nothing of its own is found again
        computed = store(stores, prompts)
        assert sum(computed.cached) == 0
        reads.reset()
        found = reads.generate(prompts)
        assert (found.tokens, found.cached) == (computed.tokens, [BLOCKS * BLOCK] * PROMPTS)

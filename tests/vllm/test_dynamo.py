"""The indexer of NVIDIA Dynamo's router, fed with the events of a real vLLM over ZMQ, sees every tier of the stack."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from engines import BLOCK, VOCABULARY, Engine, engine, make_model, stack
from support_dynamo import Block, DynamoIndexer, dynamo_indexer, dynamo_python, until

from kvtier_remote.valkey.embedded import free_ports

pytestmark = [pytest.mark.router, pytest.mark.timeout(3600)]  # each step of an engine has a deadline of its own

TIERS = {"device", "host_pinned", "disk"}
BLOCKS = 3


def prompt(number: int, blocks: int = BLOCKS) -> list[int]:
    """A prompt of some whole blocks and a bit."""
    rng = random.Random(number)
    return [rng.randrange(3, VOCABULARY) for _ in range(blocks * BLOCK + 5)]


class Watched:
    """An engine, and what the indexer knows of it."""

    def __init__(self, vllm: Engine, indexer: DynamoIndexer, worker: int) -> None:
        self.vllm, self.indexer, self.worker = vllm, indexer, worker

    def serve(self, number: int) -> tuple[int, set[Block]]:
        """Serve a prompt that the GPU does not have: how many of its tokens were cached, and its blocks, which are the
        new ones on the GPU."""
        before = self.indexer.blocks(self.worker)["device"]
        (cached,) = self.vllm.generate([prompt(number)], tokens=2).cached
        until(lambda: len(self._new(before)) == BLOCKS, lambda: f"{self._new(before)} on the GPU")
        blocks = self._new(before)
        parents, names = {parent for parent, _, _ in blocks}, {name for _, name, _ in blocks}
        assert len(parents - names) == 1
        assert None in parents, "one chain from the beginning of the prompt"
        return cached, blocks

    def _new(self, before: set[Block]) -> set[Block]:
        return self.indexer.blocks(self.worker)["device"] - before

    def tiers(self, blocks: set[Block]) -> set[str]:
        """Where the indexer has all of these blocks, with their tokens; and as one word each, where it has a part."""
        found = self.indexer.blocks(self.worker)
        whole = {tier for tier, there in found.items() if blocks <= there}
        return whole | {f"part in {tier}" for tier, there in found.items() if there & blocks and tier not in whole}

    def until(self, blocks: set[Block], tiers: set[str]) -> None:
        """Wait until the indexer has these blocks in these tiers. vLLM publishes in steps alone: an engine without a
        request says with its next one what was written to disk after its last step."""

        def told() -> bool:
            self.vllm.generate([prompt(0)[: BLOCK // 2]], tokens=1)
            return self.tiers(blocks) == tiers

        until(told, lambda: f"in {self.tiers(blocks)}, not in {tiers}")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model("llama", tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture
def indexer(request, tmp_path) -> Iterator[DynamoIndexer]:
    with dynamo_indexer(dynamo_python(request), tmp_path, BLOCK) as one:
        yield one


@contextmanager
def heard(
    indexer: DynamoIndexer, worker: int, model: Path, folder: Path, described: dict[str, Any], chunk: int = 1
) -> Iterator[Watched]:
    """An engine whose events the indexer hears: it knows the last of some prompts that were served to find out."""
    (port,) = free_ports(1)
    events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{port}", "topic": ""}
    connector = {"self_describing_kv_events": True, "blocks_per_chunk": chunk}
    with engine(model, folder, described, connector=connector, kv_events_config=events) as vllm:
        indexer.register(worker, f"tcp://127.0.0.1:{port}")
        for number in range(1000 * worker, 1000 * worker + 500):
            vllm.generate([prompt(number, 1)], tokens=2)
            if indexer.matched(worker, prompt(number, 1)):
                break
        else:
            raise AssertionError("the indexer hears nothing")
        yield Watched(vllm, indexer, worker)
    indexer.unregister(worker)


def test_it_sees_every_tier_and_after_a_restart_and_one_request_the_disk(indexer, model, root, tmp_path):
    with heard(indexer, 1, model, tmp_path, stack(root, 600)) as one:
        _, blocks = one.serve(1)
        one.until(blocks, TIERS)
        assert indexer.matched(1, prompt(1)) == dict.fromkeys(("gpu", "cpu", "disk"), BLOCKS * BLOCK)
    with heard(indexer, 2, model, tmp_path, stack(root, 600)) as one:
        assert one.tiers(blocks) == set()
        assert one.serve(1) == (BLOCKS * BLOCK, blocks)
        one.until(blocks, TIERS)


def test_a_reset_of_the_gpu_alone_hides_the_tiers_until_their_next_use_and_one_of_all_empties_them(
    indexer, model, root, tmp_path
):
    with heard(indexer, 1, model, tmp_path, stack(root, 600)) as one:
        _, blocks = one.serve(1)
        one.until(blocks, TIERS)
        one.vllm.reset()  # vLLM tells routers that everything is gone
        _, others = one.serve(2)
        one.until(others, TIERS)
        assert one.tiers(blocks) == set()
        assert one.serve(1) == (BLOCKS * BLOCK, blocks)
        one.until(blocks, TIERS)
        one.vllm.reset(tiers=True)
        _, others = one.serve(3)
        one.until(others, TIERS)
        assert one.tiers(blocks) == set()
        assert one.serve(1) == (0, blocks)
        one.until(blocks, TIERS)


@pytest.mark.parametrize("chunk", [1, 3])
def test_what_a_tier_evicts_is_gone_from_it_alone(indexer, model, root, tmp_path, chunk):
    """The CPU tier has room for two prompts, the disk for some more."""
    small = stack(root, 6, capacity="40MiB", region_bytes="8MiB")
    with heard(indexer, 1, model, tmp_path, small, chunk) as one:
        _, blocks = one.serve(1)
        one.until(blocks, TIERS)
        for number in (2, 3):
            _, others = one.serve(number)
            one.until(others, TIERS)
        one.until(blocks, {"device", "disk"})
        for number in range(4, 200):
            _, others = one.serve(number)
            one.until(others, TIERS)
            if one.tiers(blocks).isdisjoint({"disk", "part in disk"}):
                break
        one.until(blocks, {"device"})

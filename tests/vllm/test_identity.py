"""What an operator may change between two lives: the real vLLM restarted on the same root must recompute where that
decides the bytes of K and V, and must not where it does not.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import ANSWER_SECONDS, BLOCK, VOCABULARY, Answer, Engine, engine, make_model, stack, total
from safetensors.torch import save_file

from kvtier.engines.digests import YOUNG_SECONDS

pytestmark = [pytest.mark.engine, pytest.mark.timeout(3600)]  # each step of an engine has a deadline of its own

WINDOWS = 16
WINDOW_BYTES = 64 << 10
"""What a digest of samples would read of a file of weights: so many windows, evenly spread."""


def asked(count: int, blocks: int) -> list[list[int]]:
    """Prompts of so many full blocks and a bit that share nothing."""
    rng = random.Random(count)
    return [[rng.randrange(3, VOCABULARY) for _ in range(blocks * BLOCK + 40)] for _ in range(count)]


def answers(
    model: Path,
    folder: Path,
    prompts: list[list[int]],
    root: Path | None = None,
    adapter: Path | None = None,
    settle: bool = True,
    **config: Any,
) -> Answer:
    """The outputs of an engine, started for this and closed; with kvtier if there is a root, and then not closed before
    all blocks are on disk if it is to `settle`. An engine that exits or hangs raises RuntimeError. I/O is by threads:
    the liburing wheel contains AVX-512, which not every CPU has."""
    tiers = None if root is None else stack(root, 100, io_engine="threads")
    try:
        with engine(model, folder, tiers, enable_lora=adapter is not None, **config) as vllm:
            answer = vllm.generate(prompts, adapter=None if adapter is None else str(adapter))
            if root is not None and settle:
                wait_for_the_disk(vllm, sum(len(prompt) // BLOCK for prompt in prompts))
            return answer
    except AssertionError as error:
        raise RuntimeError("the engine failed") from error


def wait_for_the_disk(vllm: Engine, blocks: int) -> None:
    """Until every block is on disk, stored by this engine or an earlier one: a cold restart would prove nothing."""
    deadline = time.monotonic() + ANSWER_SECONDS
    while True:
        told = vllm.metrics()
        slots = {name: value for name, value in told.items() if name.startswith("kvtier_slots") and "tier=fs" in name}
        if sum(value for name, value in slots.items() if "state=ready" in name) >= blocks:
            return
        if time.monotonic() > deadline:
            raise RuntimeError(f"{blocks} blocks should be on disk: {slots}")


def differing(one: Answer, other: Answer) -> int:
    return sum(mine != others for mine, others in zip(one.tokens, other.tokens, strict=False))


def compare(before: Answer, expected: Answer, restarted: Answer) -> None:
    """The outputs after the restart must equal those of vLLM without kvtier on the changed model."""
    count = len(expected.tokens)
    if sum(before.cached) or differing(before, expected) < count:
        raise RuntimeError(f"the change must change every output of a cold engine: {before}, {expected}")
    wrong = differing(restarted, expected)
    print(f"cached after the restart: {sum(restarted.cached)} tokens; outputs that differ: {wrong} of {count}")
    assert restarted.tokens == expected.tokens


def test_another_max_model_len_selects_other_rotary_factors(root, tmp_path):
    model = make_model("phi3", tmp_path / "phi3")
    prompts = asked(6, blocks=8)
    before = answers(model, tmp_path, prompts, root, max_model_len=4096)
    expected = answers(model, tmp_path, prompts, max_model_len=8192)
    restarted = answers(model, tmp_path, prompts, root, max_model_len=8192)
    compare(before, expected, restarted)


@dataclasses.dataclass
class Before:
    """What an engine on the model answered before anything was changed, and the disk it left."""

    model: Path
    root: Path
    answer: Answer


@pytest.fixture(scope="module")
def before(tmp_path_factory) -> Before:
    folder = tmp_path_factory.mktemp("before")
    model = make_model("llama", folder / "model")
    root = folder / "root"
    root.mkdir(mode=0o700)
    return Before(model, root, answers(model, folder, asked(4, blocks=5), root))


def other_weights(model: Path) -> None:
    other = make_model("llama", model.with_name("other"), seed=1)
    shutil.copy(other / "model.safetensors", model / "model.safetensors")


def other_head(model: Path) -> None:
    """Another value of one weight that decides no key and no value: it still is another file."""
    path = model / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def other_chat_template(model: Path) -> None:
    (model / "chat_template.jinja").write_text("{{ messages[0].content }}")


def other_rotary_base(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] *= 3
    (model / "config.json").write_text(json.dumps(config))


Change = tuple[Callable[[Path], None] | None, dict[str, Any]]
"""What is done to a model's folder, and the configuration of the engine that is started on it."""
SCALED = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
CHANGES: dict[str, Change] = {
    "weights": (other_weights, {}),
    "a weight of the head": (other_head, {}),
    "rotary base": (other_rotary_base, {}),
    "rope scaling": (None, {"hf_overrides": {"rope_parameters": SCALED}}),
    "dtype": (None, {"dtype": "bfloat16"}),
    "type of the KV cache": (None, {"kv_cache_dtype": "fp8"}),
    "block size": (None, {"block_size": 64}),
    "tensor parallel size": (None, {"tensor_parallel_size": 2}),
}


NEEDS_AVX512 = {
    "type of the KV cache": pytest.mark.skipif(
        not torch.cpu._is_avx512_supported(), reason="vLLM has no FP8 KV cache on a CPU without AVX-512"
    )
}


@pytest.mark.parametrize("change", [pytest.param(name, marks=NEEDS_AVX512.get(name, ())) for name in CHANGES])
def test_one_change_of_what_decides_the_bytes(before, tmp_path, change):
    """Nothing is found, and the outputs are those of an engine without a connector."""
    model, root, config = changed(before, tmp_path, CHANGES[change])
    prompts = asked(4, blocks=5)
    expected = answers(model, tmp_path, prompts, **config)
    restarted = answers(model, tmp_path, prompts, root, settle=False, **config)
    assert restarted.tokens == expected.tokens
    assert restarted.cached == [0] * 4


SAME: dict[str, Change] = {
    "nothing but folder and times": (None, {}),
    "chat template": (other_chat_template, {}),
    "longest prompt": (None, {"max_model_len": 8192}),
    "most requests at once": (None, {"max_num_seqs": 2}),
}


@pytest.mark.parametrize("change", SAME)
def test_what_does_not_decide_the_bytes_may_change(before, tmp_path, change):
    """Everything is found again, so that a restart and another host with a copy of the model are warm."""
    model, root, config = changed(before, tmp_path, SAME[change])
    restarted = answers(model, tmp_path, asked(4, blocks=5), root, settle=False, **config)
    assert restarted.tokens == before.answer.tokens
    assert restarted.cached == [5 * BLOCK] * 4


def test_a_disk_joins_a_running_engine_when_the_digest_of_the_weights_is_known(before, tmp_path):
    model, root = copied(before, tmp_path)
    gate, prompts = tmp_path / "gate", asked(4, blocks=5)
    environment = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    tiers = stack(root, 100, io_engine="threads")
    with engine(model, tmp_path, tiers, environment, digests_after=str(gate)) as vllm:
        held_back = vllm.generate(prompts[:2])
        vllm.reset()
        gate.touch()
        until = time.monotonic() + ANSWER_SECONDS
        while True:
            joined = vllm.generate(prompts[2:])
            if total(vllm.metrics(), "kvtier_loaded_blocks_total", "tier=fs"):
                break
            assert time.monotonic() < until, vllm.metrics()
            vllm.reset()
    assert held_back.tokens + joined.tokens == before.answer.tokens
    assert held_back.cached + joined.cached == [0] * 2 + [5 * BLOCK] * 2


def changed(before: Before, folder: Path, change: Change) -> tuple[Path, Path, dict[str, Any]]:
    """A changed copy of the model, a copy of the disk, and the configuration."""
    alter, config = change
    model, root = copied(before, folder)
    if alter is not None:
        alter(model)
    return model, root, config


def copied(before: Before, folder: Path) -> tuple[Path, Path]:
    """Copies of the model, with times of their own, and of the disk."""
    shutil.copytree(before.model, folder / "model", copy_function=shutil.copyfile)
    return folder / "model", Path(shutil.copytree(before.root, folder / "root"))


def test_an_adapter_trained_again_in_place(models, root, tmp_path):
    model, adapter = models["llama"], tmp_path / "adapter"
    prompts = asked(4, blocks=5)
    train(adapter, seed=1)
    wait_until_storable(adapter)
    before = answers(model, tmp_path, prompts, root, adapter)
    train(adapter, seed=2)
    expected = answers(model, tmp_path, prompts, None, adapter)
    restarted = answers(model, tmp_path, prompts, root, adapter)
    compare(before, expected, restarted)


def test_an_adapter_is_found_again_by_its_content_also_elsewhere(models, root, tmp_path):
    model, adapter, copy = models["llama"], tmp_path / "adapter", tmp_path / "elsewhere" / "copy"
    prompts = asked(4, blocks=5)
    train(adapter, seed=1)
    wait_until_storable(adapter)
    before = answers(model, tmp_path, prompts, root, adapter)
    shutil.copytree(adapter, copy)
    for path in (adapter, copy):
        restarted = answers(model, tmp_path, prompts, root, path)
        assert restarted.tokens == before.tokens
        assert restarted.cached == [5 * BLOCK] * 4


def test_an_adapter_replaced_while_the_engine_runs(models, root, tmp_path):
    model, adapter = models["llama"], tmp_path / "adapter"
    first, second, third = (asked(count, blocks=5) for count in (4, 5, 6))
    train(adapter, seed=1)
    wait_until_storable(adapter)
    with engine(model, tmp_path, stack(root, 100, io_engine="threads"), enable_lora=True) as vllm:
        before = vllm.generate(first, adapter=str(adapter))
        train(adapter, seed=2)
        vllm.generate(second, adapter=str(adapter))  # the workers have the one before, and nothing says so
        wait_until_storable(adapter)
        assert vllm.ask(do="load_in_place", adapter=str(adapter))
        vllm.generate(third, adapter=str(adapter))
        wait_for_the_disk(vllm, 5 * (len(first) + len(third)))
    expected = answers(model, tmp_path, first + second + third, None, adapter)
    restarted = answers(model, tmp_path, first + second + third, root, adapter)
    assert differing(before, expected) == len(first)
    print(f"outputs that differ: {differing(restarted, expected)} of 15, cached: {restarted.cached}")
    assert restarted.tokens == expected.tokens
    assert restarted.cached == [0] * 9 + [5 * BLOCK] * 6


def test_weights_replaced_between_the_samples(root, tmp_path):
    model = make_model("wide_llama", tmp_path / "model")
    prompts = asked(6, blocks=8)
    before = answers(model, tmp_path, prompts, root)
    replaced = replace_between_samples(model, make_model("wide_llama", tmp_path / "other", seed=1))
    expected = answers(model, tmp_path, prompts)
    restarted = answers(model, tmp_path, prompts, root)
    print(f"{replaced} bytes of weights replaced")
    compare(before, expected, restarted)


@pytest.mark.parametrize("change", ["reload", "reload and reset", "write and reset"])
def test_weights_replaced_in_a_running_engine(models, root, tmp_path, change):
    model, other = models["llama"], make_model("llama", tmp_path / "other", seed=1)
    first, second = asked(4, blocks=5), asked(5, blocks=5)
    expected = answers(model, tmp_path, first + second)
    insecure = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
    with engine(model, tmp_path, stack(root, 100, io_engine="threads"), insecure) as vllm:
        vllm.generate(first)
        wait_for_the_disk(vllm, 5 * 4)
        vllm.ask(do="flip") if "write" in change else vllm.ask(do="reload", weights=str(other))
        vllm.reset(tiers="reset" in change)
        changed = vllm.generate(first + second)
    assert not set(map(tuple, changed.tokens)) & set(map(tuple, expected.tokens)), "a change is to be seen"
    restarted = answers(model, tmp_path, first + second, root)
    print(f"cached: {restarted.cached}, outputs that differ: {differing(restarted, expected)} of 9")
    assert restarted.tokens == expected.tokens


def test_a_reset_without_other_weights_goes_on_with_the_disk(models, root, tmp_path):
    first, second = asked(4, blocks=5), asked(5, blocks=5)
    with engine(models["llama"], tmp_path, stack(root, 100, io_engine="threads")) as vllm:
        vllm.generate(first)
        wait_for_the_disk(vllm, 5 * 4)
        vllm.reset(tiers=True)
        before = vllm.generate(second)
        wait_for_the_disk(vllm, 5 * 5)
    restarted = answers(models["llama"], tmp_path, second + first, root)
    assert restarted.tokens[:5] == before.tokens
    assert restarted.cached == [5 * BLOCK] * 5 + [0] * 4


def train(folder: Path, seed: int) -> None:
    """Write a LoRA adapter for the attention of the small Llama, as PEFT does; another seed, another adapter."""
    folder.mkdir(exist_ok=True)
    rank, hidden = 8, 128
    generator = torch.Generator().manual_seed(seed)
    widths = {"q_proj": 128, "k_proj": 64, "v_proj": 64, "o_proj": 128}
    tensors = {}
    for layer in range(2):
        for name, width in widths.items():
            module = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{module}.lora_A.weight"] = 0.3 * torch.randn(rank, hidden, generator=generator)
            tensors[f"{module}.lora_B.weight"] = 0.3 * torch.randn(width, rank, generator=generator)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": list(widths),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))


def wait_until_storable(adapter: Path) -> None:
    """Requests of an adapter are not stored while its files are young."""
    while time.time() - (adapter / "adapter_config.json").stat().st_ctime < YOUNG_SECONDS + 0.2:
        time.sleep(0.1)


def replace_between_samples(model: Path, other: Path) -> int:
    """Put another model's weights between the windows; size and times stay. Returns how many bytes."""
    path, donor = model / "model.safetensors", other / "model.safetensors"
    found = path.stat()
    old, new = path.read_bytes(), bytearray(donor.read_bytes())
    if len(new) != len(old):
        raise RuntimeError("both models must have the same shape")
    for window in range(WINDOWS):
        start = (len(old) - WINDOW_BYTES) * window // (WINDOWS - 1)
        new[start : start + WINDOW_BYTES] = old[start : start + WINDOW_BYTES]
    path.write_bytes(new)
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))
    return len(old) - WINDOWS * WINDOW_BYTES

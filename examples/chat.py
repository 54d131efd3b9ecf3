"""A chat of several turns whose KV cache comes back from CPU memory and, after restarts, from disk.

    python examples/chat.py

A small random model is made on the spot; nothing is downloaded. The same conversation is held four times:

    cold   every turn computes its whole prompt
    kept   without kvtier: the cache stays in memory from turn to turn, truncated to the blocks that kvtier would keep
    CPU    every turn restores its prefix from the CPU tier and saves what it computed
    disk   the same, but the stack is closed and opened again before every turn, so that nothing is left in memory

The table shows the time to first token of every turn. The logits of every token that the CPU and disk runs computed
must be those of the kept run, bit for bit; the exit status is 1 if they are not.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from rich.console import Console
from rich.table import Table
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from kvtier.config import parse_stack
from kvtier.engines.transformers import PrefixCache, cache_argument

VOCABULARY = 1000
BLOCK_SIZE = 16
STACK = """
tiers:
  - {{type: cpu, cpu_bytes_to_use: 256MiB}}
  - {{type: fs, roots: ["{root}"], capacity: 1GiB}}
"""


class Memory(Protocol):
    """Where a conversation's KV cache is between two turns; a PrefixCache is one."""

    def restore(self, token_ids: Sequence[int]) -> tuple[DynamicCache, int]: ...
    def save(self, token_ids: Sequence[int], cache: DynamicCache) -> int: ...


class Nowhere:
    """Every turn begins from nothing."""

    def restore(self, token_ids: Sequence[int]) -> tuple[DynamicCache, int]:
        return DynamicCache(), 0

    def save(self, token_ids: Sequence[int], cache: DynamicCache) -> int:
        return 0


class Kept(Nowhere):
    """The cache itself, truncated to whole blocks: what a restored one is compared with."""

    def __init__(self) -> None:
        self.cache = DynamicCache()

    def restore(self, token_ids: Sequence[int]) -> tuple[DynamicCache, int]:
        count = self.cache.get_seq_length() // BLOCK_SIZE * BLOCK_SIZE
        cut = DynamicCache()
        for index, layer in enumerate(self.cache.layers):
            cut.update(layer.keys[:, :, :count], layer.values[:, :, :count], index)
        return cut, count

    def save(self, token_ids: Sequence[int], cache: DynamicCache) -> int:
        self.cache = cache
        return len(token_ids)


@dataclass
class Turn:
    """What one turn took and computed; `logits` of every token computed, prompt and answer."""

    prompt_tokens: int
    restored_tokens: int
    seconds_to_first_token: float
    logits: torch.Tensor


def converse(
    model: LlamaForCausalLM,
    messages: Sequence[list[int]],
    answer_tokens: int,
    memory: Callable[[], AbstractContextManager[Memory]],
) -> list[Turn]:
    """Hold the conversation; `memory()` is entered at the beginning of every turn and left at its end."""
    turns, tokens = [], []
    for message in messages:
        tokens = tokens + message
        with memory() as between_turns:
            turn, tokens, cache = answer(model, tokens, answer_tokens, between_turns)
            between_turns.save(tokens, cache)
        turns.append(turn)
    return turns


def answer(
    model: LlamaForCausalLM, prompt: list[int], answer_tokens: int, memory: Memory
) -> tuple[Turn, list[int], DynamicCache]:
    """One greedy answer: (the turn, prompt and answer, the cache of all of it but the last token)."""
    started = time.perf_counter()
    cache, restored = memory.restore(prompt)
    tokens, new, logits, seconds = prompt, prompt[restored:], [], 0.0
    argument = cache_argument(model)  # `cache` or, before transformers 5.24, `past_key_values`
    for _ in range(answer_tokens):
        inputs = {"input_ids": torch.tensor([new], device=model.device), argument: cache}
        logits.append(model(**inputs).logits[0])
        new = [int(logits[-1][-1].argmax())]
        tokens = tokens + new
        seconds = seconds or time.perf_counter() - started
    return Turn(len(prompt), restored, seconds, torch.cat(logits)), tokens, cache


def report(cold: list[Turn], kept: list[Turn], cpu: list[Turn], disk: list[Turn]) -> bool:
    """Print the table; True if every run from the stack restored what it should and computed the very same logits."""
    table = Table(title="time to first token, in milliseconds")
    for name in ("turn", "prompt tokens", "restored", "cold", "from CPU", "from disk", "logits"):
        table.add_column(name, justify="right")
    good = True
    for number, (none, reference, *from_stack) in enumerate(zip(cold, kept, cpu, disk, strict=True), 1):
        identical = all(
            turn.restored_tokens == reference.restored_tokens and torch.equal(turn.logits, reference.logits)
            for turn in from_stack
        )
        good = good and identical
        times = [f"{1000 * turn.seconds_to_first_token:.1f}" for turn in (none, *from_stack)]
        counts = [str(number), str(reference.prompt_tokens), str(reference.restored_tokens)]
        table.add_row(*counts, *times, "identical" if identical else "DIFFERENT")
    console = Console()
    console.print(table)
    console.print(
        f"The logits of all {sum(len(turn.logits) for turn in kept)} tokens computed are bit for bit those of a run "
        "without kvtier that keeps its cache in memory."
        if good
        else "Restored prefixes or logits differ from those of a run without kvtier."
    )
    return good


def small_model(layers: int) -> LlamaForCausalLM:
    """A random Llama, 2 KiB of KV cache for each token and layer."""
    shape = {"hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8, "num_key_value_heads": 4}
    config = LlamaConfig(vocab_size=VOCABULARY, num_hidden_layers=layers, max_position_embeddings=32768, **shape)
    return LlamaForCausalLM(config).eval()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="time to first token of a chat, cold, from CPU and from disk")
    parser.add_argument("--turns", type=int, default=6, help="how often the user says something")
    parser.add_argument("--message", type=int, default=240, help="tokens of each message")
    parser.add_argument("--answer", type=int, default=16, help="tokens of each answer")
    parser.add_argument("--layers", type=int, default=8, help="layers of the model")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--disk", type=Path, help="a folder on the disk to use; the temporary folder when left out")
    options = parser.parse_args(arguments)

    torch.manual_seed(0)
    model = small_model(options.layers).to(options.device)
    rng = random.Random(0)
    messages = [[rng.randrange(VOCABULARY) for _ in range(options.message)] for _ in range(options.turns)]
    with tempfile.TemporaryDirectory(dir=options.disk) as folder, torch.inference_mode():
        kept = Kept()
        runs = [converse(model, messages, options.answer, lambda: nullcontext(kept))]  # the first run also warms up
        runs.insert(0, converse(model, messages, options.answer, lambda: nullcontext(Nowhere())))
        stacks = [parse_stack(STACK.format(root=Path(folder) / name)) for name in ("cpu", "disk")]
        with PrefixCache(stacks[0], model, BLOCK_SIZE) as prefixes:
            runs.append(converse(model, messages, options.answer, lambda: nullcontext(prefixes)))
        runs.append(converse(model, messages, options.answer, lambda: PrefixCache(stacks[1], model, BLOCK_SIZE)))
    return 0 if report(*runs) else 1


if __name__ == "__main__":
    sys.exit(main())

"""What a trace holds: requests, lengths, and how much of it could be found again."""

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console

from kvtier.options import count_text
from kvtier.traces.requests import KeyChain, RequestSource


@dataclass(frozen=True, slots=True)
class TraceSummary:
    """Figures of a trace.

    `reused_blocks` are those of each prompt's longest prefix that earlier prompts had: what a cache without bound hits.
    `seconds` lie between the first and the last request; 0 where no times are known.
    """

    name: str
    requests: int
    sessions: int
    seconds: float
    prompt_tokens: int
    output_tokens: int
    block_tokens: int
    longest_blocks: int
    block_references: int
    distinct_blocks: int
    single_use_blocks: int
    reused_blocks: int

    @property
    def ok(self) -> bool:
        return True

    @property
    def reuse(self) -> float:
        """The share of block references that a cache without bound hits."""
        return self.reused_blocks / self.block_references if self.block_references else 0.0

    def to_json(self) -> dict[str, Any]:
        """Every figure by name."""
        return asdict(self) | {"reuse": round(self.reuse, 4)}

    def show(self, console: Console) -> None:
        """Print the figures, a line for each."""
        once = self.single_use_blocks / self.distinct_blocks if self.distinct_blocks else 0.0
        rows = {
            "requests": f"{count_text(self.requests)} in {self.seconds:,.0f} s",
            "sessions": count_text(self.sessions) if self.sessions else "not in the trace",
            "tokens": f"{count_text(self.prompt_tokens)} of prompts, {count_text(self.output_tokens)} of outputs",
            "blocks": f"{count_text(self.block_references)} of {self.block_tokens} tokens, "
            f"{count_text(self.distinct_blocks)} distinct, {once:.1%} of them used once",
            "longest prompt": f"{count_text(self.longest_blocks)} blocks",
            "reuse": f"{self.reuse:.1%} of the blocks are in a prefix that came before",
        }
        for name, text in {"trace": self.name, **rows}.items():
            console.print(f"{name:<15} {text}", soft_wrap=True, markup=False, highlight=False)


def summarize(source: RequestSource, progress: Callable[[], None] = lambda: None) -> TraceSummary:
    """Read a trace once and add it up. Takes about 150 bytes of memory for each distinct block."""
    chain, seen, sessions = KeyChain(), Counter[bytes](), set[str]()
    prompt_tokens = output_tokens = reused = 0
    for request in source.requests():
        digests = chain.digests(request)[: request.prompt_blocks]
        reused += next((at for at, digest in enumerate(digests) if digest not in seen), len(digests))
        seen.update(digests)
        sessions.add(request.session)
        prompt_tokens += request.prompt_tokens
        output_tokens += request.output_tokens
        progress()
    return TraceSummary(
        source.name,
        source.num_requests,
        len(sessions - {""}),
        source.seconds or 0.0,
        prompt_tokens,
        output_tokens,
        source.block_tokens,
        source.longest_blocks,
        seen.total(),
        len(seen),
        sum(count == 1 for count in seen.values()),
        reused,
    )

"""`kvtier record`: what a trace holds, and an anonymised copy of one."""

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from kvtier.cli.terminal import progress
from kvtier.errors import ConfigError
from kvtier.options import count_text
from kvtier.tools.commands.run_report import json_file_option, note_times, report, time_unit_option
from kvtier.traces.read import TimeUnit, read_trace
from kvtier.traces.requests import KeyChain, RequestSource
from kvtier.traces.write import RecordedRequest, TraceFile, TraceLines, read_salt


@click.command(short_help="Show what a trace holds, or write it anonymised.")
@click.argument("trace", type=click.Path(path_type=Path))
@click.option("--requests", type=click.IntRange(1), metavar="N", help="Only the first N requests.")
@click.option(
    "--block-tokens",
    type=click.IntRange(1),
    metavar="N",
    help="Tokens of a block, if neither the lines say them nor they follow from the lengths.",
)
@time_unit_option
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    metavar="FILE.jsonl.gz",
    help="Write the requests here, gzip'ed, with salted hashes in place of their ids.",
)
@click.option(
    "--salt-file",
    type=click.Path(path_type=Path),
    help="Secret for the hashes of --out, made if absent. A random one when left out.",
)
@json_file_option
def record(
    trace: Path,
    requests: int | None,
    block_tokens: int | None,
    time_unit: TimeUnit | None,
    out: Path | None,
    salt_file: Path | None,
    json_file: Path | None,
) -> None:
    """Show how many requests, tokens and blocks TRACE has, and how much of it a cache could find again.

    A running stack writes traces by itself: see `record` in its stack file.
    """
    if salt_file is not None and out is None:
        raise ConfigError("goes with --out only", "--salt-file")
    source = read_trace(trace, requests, block_tokens, time_unit)
    note_times(source)
    if out is not None:
        with progress(f"writing {out.name}", source.num_requests) as advance:
            convert(source, out, salt_file, advance)
    with progress(source.name, source.num_requests) as advance:
        found = summarize(source, advance)
    report(found, json_file)


@dataclass(frozen=True, slots=True)
class TraceSummary:
    """Figures of a trace.

    `block_references` counts the blocks of all prompts, partial ones included; a partial block is never found again, so
    what follows counts whole ones. `reused_blocks` are those of each prompt's longest prefix that earlier prompts had:
    what a cache without bound hits. `seconds` lie between the first and the last request; 0 where no times are known.
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
            f"{count_text(self.distinct_blocks)} distinct whole ones, {once:.1%} of them used once",
            "longest prompt": f"{count_text(self.longest_blocks)} blocks",
            "reuse": f"{self.reuse:.1%} of the blocks are in a prefix that came before",
        }
        for name, text in {"trace": self.name, **rows}.items():
            console.print(f"{name:<15} {text}", soft_wrap=True, markup=False, highlight=False)


def summarize(source: RequestSource, progress: Callable[[], None] = lambda: None) -> TraceSummary:
    """Read a trace once and add it up. Takes about 150 bytes of memory for each distinct block."""
    chain, seen, sessions = KeyChain(), Counter[bytes](), set[str]()
    prompt_tokens = output_tokens = references = reused = 0
    for request in source.requests():
        whole = min(request.prompt_blocks, request.prompt_tokens // source.block_tokens)
        digests = chain.digests(request)[:whole]
        references += request.prompt_blocks
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
        references,
        len(seen),
        sum(count == 1 for count in seen.values()),
        reused,
    )


def convert(
    source: RequestSource, path: Path, salt_file: Path | None = None, progress: Callable[[], None] = lambda: None
) -> None:
    """Write the prompts of a trace to a new file, in their order: times from 0, lengths, and salted hashes as ids.

    Ids that are local to a session become global. Raises ConfigError for a file that cannot be written.
    """
    try:
        lines = TraceLines(read_salt(salt_file), source.block_tokens, epoch=0.0)
        file = TraceFile(path)
        try:
            _copy(source, lines, file, progress)
        finally:
            file.close()
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}", "--out") from None


def _copy(source: RequestSource, lines: TraceLines, file: TraceFile, progress: Callable[[], None]) -> None:
    chain = KeyChain()
    first = min(request.arrived or 0.0 for request in source.requests())
    for request in source.requests():
        keys = chain.digests(request)[: request.prompt_blocks]
        arrived = (request.arrived or 0.0) - first
        file.add(lines.line(RecordedRequest(arrived, keys, request.prompt_tokens, request.output_tokens)))
        progress()

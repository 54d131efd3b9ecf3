"""An anonymised copy of a trace."""

from collections.abc import Callable
from pathlib import Path

from kvtier.errors import ConfigError
from kvtier.traces.requests import KeyChain, RequestSource
from kvtier.traces.write import RecordedRequest, TraceFile, TraceLines, read_salt


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

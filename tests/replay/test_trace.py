"""Trace readers: both forms, plain and gzip; every bad line named by its number; the known facts of the real traces."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from support_paths import TRACES

from kvtier.errors import ConfigError
from kvtier.traces.read import read_lines, read_trace, zstd
from kvtier.traces.requests import KeyChain


def write(path: Path, *lines: object) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def line(ids: list[int], tokens: int, **more: object) -> dict[str, object]:
    return {"timestamp": 0, "input_length": tokens, "output_length": 7, "hash_ids": ids, **more}


def test_reads_plain_ids(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", line([5, 6, 7], 1100), line([5, 9], 1024))
    trace = read_trace(path)
    first, second = trace.requests()
    assert first.ids.tolist() == [5, 6, 7]
    assert (first.prompt_tokens, first.output_tokens, first.prompt_blocks) == (1100, 7, 3)
    assert second.ids.tolist() == [5, 9]
    assert (trace.num_requests, trace.longest_blocks, trace.block_tokens) == (2, 3, 512)


def test_reads_run_length_ids_zipped(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl.gz"
    fields = {"session": "s", "t": 0.5, "sub": 1, "input_length": 330, "output_length": 0, "rle": [[1, 3], [90, 2]]}
    path.write_bytes(gzip.compress(json.dumps(fields).encode()))
    trace = read_trace(path)
    (request,) = trace.requests()
    assert request.ids.tolist() == [1, 2, 3, 90, 91]
    assert request.session == "s"
    assert trace.block_tokens == 64


def test_sessions_never_share_a_block(tmp_path: Path) -> None:
    same = {"input_length": 128, "output_length": 0, "rle": [[1, 2]]}
    path = write(tmp_path / "t.jsonl", {"session": "a", **same}, {"session": "b", **same}, {"session": "a", **same})
    chain = KeyChain()
    first, second, again = (chain.digests(request) for request in read_trace(path).requests())
    assert first == again
    assert not set(first) & set(second)


def test_times_are_read_in_seconds_as_they_are(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", line([1], 400, timestamp=90_500), line([1], 400, timestamp=0.0))
    assert [request.arrived for request in read_trace(path).requests()] == [90.5, 0.0]
    agentic = {"t": 7.5, "input_length": 64, "output_length": 0, "rle": [[1, 1]]}
    without = {"input_length": 64, "output_length": 0, "rle": [[1, 1]]}
    assert [line.seconds() for line in read_lines(write(tmp_path / "u.jsonl", agentic, without))] == [7.5, None]
    with pytest.raises(ConfigError, match="timestamp"):
        read_trace(write(tmp_path / "v.jsonl", {**without, "timestamp": "noon"}))


def test_stops_at_the_limit(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", line([1], 400), line([1, 2], 600), "not json")
    trace = read_trace(path, limit=2)
    assert [len(request.ids) for request in trace.requests()] == [1, 2]


def test_block_tokens_can_be_said(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", line([1, 2, 3], 10), line([1, 2, 3], 99999))
    with pytest.raises(ConfigError, match="--block-tokens"):
        read_trace(path)
    assert read_trace(path, block_tokens=100).block_tokens == 100


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ("{", "not a JSON object"),
        ("[1]", "not a JSON object"),
        ("[" * 100_000, "not a JSON object"),
        ({"input_length": 5, "output_length": 1}, "either hash_ids or rle"),
        (line([1], 5, rle=[[1, 1]]), "either hash_ids or rle"),
        (line([1, -2], 5), "hash_ids"),
        (line([1, True], 5), "hash_ids"),
        (line([1, 1.5], 5), "hash_ids"),
        (line([1 << 64], 5), "hash_ids"),
        (line([1], 0), "input_length"),
        (line([1], 5, output_length=None), "output_length"),
        (line([1], 5, session=3), "session"),
        ({"input_length": 5, "output_length": 1, "rle": [[1]]}, "rle"),
        ({"input_length": 5, "output_length": 1, "rle": [[1, 0]]}, "rle"),
        ({"input_length": 5, "output_length": 1, "rle": [[1, 1 << 40]]}, "rle"),
        ({"input_length": 5, "output_length": 1, "rle": "1x4"}, "rle"),
    ],
)
def test_a_bad_line_is_named_by_its_number(tmp_path: Path, bad: object, reason: str) -> None:
    path = write(tmp_path / "t.jsonl", line([1], 5), "", bad)
    with pytest.raises(ConfigError, match=reason) as caught:
        read_trace(path)
    assert str(caught.value).startswith(f"{path}:3: ")
    assert "\n" not in str(caught.value)


def test_files_that_are_no_trace(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gz"
    data = bytearray(gzip.compress(json.dumps(line([1], 5)).encode() * 99))
    data[-6] ^= 1
    broken.write_bytes(data)
    for path, reason in [
        (tmp_path / "absent", "No such file"),
        (tmp_path, "directory"),
        (write(tmp_path / "empty"), "no request"),
        (broken, "broken compressed data"),
    ]:
        with pytest.raises(ConfigError, match=reason):
            read_trace(path)


@pytest.mark.parametrize("compress", [gzip.compress, zstd.compress], ids=["gzip", "zstd"])
def test_a_compressed_file_is_read_up_to_where_it_was_truncated(tmp_path, caplog, compress) -> None:
    lines = [json.dumps(line([number], 5)) + "\n" for number in range(5000)]
    path = tmp_path / "t"
    path.write_bytes(compress("".join(lines).encode()))
    assert [found.hash_ids for found in read_lines(path)] == [[number] for number in range(5000)]
    assert not caplog.records
    path.write_bytes(path.read_bytes()[: len(path.read_bytes()) // 2])
    found = [found.hash_ids for found in read_lines(path)]
    assert found == [[number] for number in range(len(found))]
    assert 500 < len(found) < 4999
    assert "ends too early" in caplog.text


def test_a_line_says_when_it_came_and_its_tokens_of_a_block(tmp_path: Path) -> None:
    path = write(tmp_path / "t", line([1, 2], 2 * 384, timestamp=2500, block_tokens=384), line([1], 384, timestamp=0))
    trace = read_trace(path)
    assert trace.block_tokens == 384
    assert [request.arrived for request in trace.requests()] == [2.5, 0.0]
    since = {"session": "s", "t": 0.5, "input_length": 64, "output_length": 0, "rle": [[1, 1]]}
    assert [request.arrived for request in read_trace(write(tmp_path / "u", since)).requests()] == [0.5]


@pytest.mark.trace
@pytest.mark.skipif(not TRACES.is_dir(), reason="no trace folder beside this checkout")
def test_conversation_trace_holds_what_is_known_of_it() -> None:
    trace = read_trace(TRACES / "conversation.jsonl")
    assert (trace.num_requests, trace.block_tokens) == (12_031, 512)
    chain = KeyChain()
    seen: dict[bytes, int] = {}
    hits = 0
    for request in trace.requests():
        digests = chain.digests(request)
        hits += next((i for i, digest in enumerate(digests) if digest not in seen), len(digests))
        for digest in digests:
            seen[digest] = seen.get(digest, 0) + 1
    assert sum(seen.values()) == 288_500
    assert len(seen) == 182_790
    assert round(sum(count == 1 for count in seen.values()) / len(seen), 3) == 0.758
    assert round(hits / 288_500, 3) == 0.366


@pytest.mark.trace
@pytest.mark.skipif(not TRACES.is_dir(), reason="no trace folder beside this checkout")
def test_coding_trace_holds_what_is_known_of_it() -> None:
    path = TRACES / "agentic_coding.jsonl.gz"
    assert read_trace(path).block_tokens == 64
    assert len({line.session for line in read_lines(path)}) == 355

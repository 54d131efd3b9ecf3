"""Recording: what is in the files, in which order, within which bound; and that it never holds up who records."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from faults.machine import warm
from kvtier.errors import ConfigError
from kvtier.options import RecordOptions
from kvtier.traces import write as module
from kvtier.traces.read import read_lines, read_trace
from kvtier.traces.write import RecordedRequest, Recorder, TraceFile, TraceLines, read_salt


def keys(*words: int) -> list[bytes]:
    return [b"the key of block %d" % word for word in words]


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.jsonl.gz"))


def make(folder: Path, **more: object) -> Recorder:
    return Recorder(RecordOptions(folder=str(folder), **more), 16)  # type: ignore[arg-type]


def wait_for(recorder: Recorder, requests: int) -> None:
    """Until so many are written, or one is lost."""
    while recorder.recorded < requests and not recorder.dropped:
        time.sleep(0)


async def test_a_trace_holds_lengths_times_and_equal_ids_for_equal_keys_and_no_key(tmp_path: Path) -> None:
    recorder = make(tmp_path / "traces")
    recorder.open()
    begun = time.monotonic()
    recorder.record(keys(1, 2, 3), 50, 7, begun + 2.0)
    recorder.record(keys(1, 2, 4), 48, 0, begun + 1.0)
    await recorder.close()
    (path,) = files(tmp_path / "traces")
    first, later = read_lines(path)
    assert (first.input_length, first.output_length, later.input_length, later.output_length) == (48, 0, 50, 7)
    assert later.seconds() - first.seconds() == pytest.approx(1.0, abs=0.002)
    assert later.hash_ids[:2] == first.hash_ids[:2]
    assert later.hash_ids[2] != first.hash_ids[2]
    assert read_trace(path).block_tokens == 16
    assert (recorder.recorded, recorder.dropped) == (2, 0)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_ids_hang_on_the_salt_and_fit_into_a_double() -> None:
    request = RecordedRequest(1.5, keys(*range(1000)), 16000, 1)
    one, other = (json.loads(TraceLines(salt, 16, 1.0).line(request)) for salt in (b"s" * 32, b"t" * 32))
    assert one["timestamp"] == other["timestamp"] == 500
    assert not set(one["hash_ids"]) & set(other["hash_ids"])
    assert len(set(one["hash_ids"])) == 1000
    assert max(one["hash_ids"]) < 1 << 53


def test_a_salt_file_is_made_once_and_refused_if_short_or_open_to_others(tmp_path: Path) -> None:
    path = tmp_path / "salt"
    assert read_salt(path) == read_salt(path)
    assert read_salt(None) != read_salt(None)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="others"):
        read_salt(path)
    short = tmp_path / "short"
    short.touch(0o600)
    with pytest.raises(ConfigError, match="0 bytes"):
        read_salt(short)


async def test_a_folder_stays_within_its_bound_and_keeps_the_latest(tmp_path: Path) -> None:
    bound = 256 << 10
    recorder = Recorder(RecordOptions.model_construct(folder=str(tmp_path), max_bytes=bound, salt_file=None), 16)
    (tmp_path / "trace-20200101T000000Z-1-00001.jsonl.gz").write_bytes(bytes(bound // 2))
    recorder.open()
    most = 0
    for number in range(1, 401):
        recorder.record([os.urandom(32) for _ in range(150)], 2400 + number, 1, time.monotonic() - 60)
        recorder.wake()
        wait_for(recorder, number)
        most = max(most, sum(path.stat().st_size for path in files(tmp_path)))
    recorder.record(keys(*range(5000)), 80_000, 1, time.monotonic())
    await recorder.close()
    assert recorder.dropped == 1, "a line that is longer than a file may be"
    found = files(tmp_path)
    assert 0.7 * bound < sum(path.stat().st_size for path in found) <= most <= bound
    lengths = [line.input_length for path in found for line in read_lines(path)]
    assert lengths == list(range(2801 - len(lengths), 2801))


async def test_what_the_thread_cannot_keep_up_with_is_dropped_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "QUEUED_BLOCKS_MAX", 11)
    recorder = make(tmp_path)
    recorder.open()
    for number in range(4):
        recorder.record(keys(1, 2, 3, 4), 64 + number, 1, time.monotonic())
    await recorder.close()
    assert (recorder.recorded, recorder.dropped) == (2, 2)
    assert [line.input_length for path in files(tmp_path) for line in read_lines(path)] == [64, 65]
    assert "2 of the requests are not in the trace" in caplog.text


async def test_prompts_without_a_whole_block_are_bounded_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "QUEUED_BLOCKS_MAX", 3)
    recorder = make(tmp_path)
    for _ in range(5):
        recorder.record([], 7, 1, time.monotonic())
    assert recorder.dropped == 2
    recorder.open()
    await recorder.close()
    assert recorder.recorded == 3


async def test_a_folder_that_cannot_be_written_costs_the_trace_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    recorder = make(tmp_path / "file" / "folder")
    recorder.open()
    for _ in range(3):
        recorder.record(keys(1), 16, 1, time.monotonic())
    await recorder.close()
    assert recorder.recorded == 0
    assert recorder.dropped == 3
    assert "not recorded any more" in caplog.text


async def test_a_disk_that_is_full_costs_the_rest_of_the_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(self: TraceFile, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(TraceFile, "_append", full)
    recorder = make(tmp_path)
    recorder.open()
    recorder.record(keys(1), 16, 1, time.monotonic())
    await recorder.close()
    assert recorder.dropped == 1
    assert "No space left" in caplog.text


def test_a_file_is_never_written_over(tmp_path: Path) -> None:
    (tmp_path / "t").touch()
    with pytest.raises(FileExistsError):
        TraceFile(tmp_path / "t")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError):
        TraceFile(tmp_path / "link")


KILLED = """
import sys, time
from pathlib import Path
from kvtier.options import RecordOptions
from kvtier.traces.write import Recorder
recorder = Recorder(RecordOptions(folder=sys.argv[1]), 16, hold_seconds=0.0)
recorder.open()
number = 0
while True:
    number += 1
    recorder.record([b"%d" % block for block in range(number)], 16 * number, 1, time.monotonic())
    recorder.wake()
    while recorder.recorded < number:
        time.sleep(0.0001)
    print(number, flush=True)
"""


def test_what_was_written_is_read_after_kill_9(tmp_path: Path) -> None:
    with warm.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        written = [int(process.stdout.readline()) for _ in range(40)][-1]
        process.send_signal(signal.SIGKILL)
        written = [written, *map(int, process.stdout)][-1]
    (path,) = files(tmp_path)
    lengths = [line.input_length for line in read_lines(path)]
    assert lengths[: written - 1] == [16 * number for number in range(1, written)]


async def record(recorder: Recorder, count: int) -> None:
    """Record so many long requests, each written before the next one comes."""
    recorder.open()
    for number in range(1, count + 1):
        recorder.record([os.urandom(32) for _ in range(150)], 2400 + number, 1, time.monotonic() - 60)
        recorder.wake()
        wait_for(recorder, number)
    await recorder.close()


def small(folder: Path, **more: object) -> Recorder:
    options = {"folder": str(folder), "max_bytes": 256 << 10, "salt_file": None} | more
    return Recorder(RecordOptions.model_construct(**options), 16)  # type: ignore[arg-type]


async def test_a_disk_that_is_full_while_a_file_is_ended_closes_its_descriptor_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ended = []

    class FullAtItsEnd(TraceFile):
        def close(self) -> None:
            ended.append(self._file)
            super().close()
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "TraceFile", FullAtItsEnd)
    recorder = small(tmp_path)
    await record(recorder, 40)
    assert len(files(tmp_path)) == len(ended) == 1
    assert recorder.dropped > 0
    assert "No space left" in caplog.text


async def test_a_dangling_link_among_the_files_is_left_alone(tmp_path: Path) -> None:
    link = tmp_path / "trace-20200101T000000Z-1-00001.jsonl.gz"
    link.symlink_to(tmp_path / "nowhere")
    recorder = small(tmp_path)
    await record(recorder, 60)
    assert (recorder.recorded, recorder.dropped) == (60, 0)
    assert link.is_symlink()


async def test_dangling_links_to_the_folder_and_the_salt_are_followed(tmp_path: Path) -> None:
    (tmp_path / "folder").symlink_to(tmp_path / "disk" / "folder")
    (tmp_path / "salt").symlink_to(tmp_path / "secret")
    recorder = small(tmp_path / "folder", salt_file=str(tmp_path / "salt"))
    await record(recorder, 2)
    assert recorder.recorded == 2
    assert len(files(tmp_path / "disk" / "folder")) == 1
    assert stat.S_IMODE((tmp_path / "secret").stat().st_mode) == 0o600
    assert len((tmp_path / "secret").read_bytes()) == 32


async def test_an_empty_salt_is_filled_and_one_that_its_group_may_read_is_private_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    salt = tmp_path / "salt"
    salt.touch(0o600)
    for mode in (0o600, 0o660):
        salt.chmod(mode)
        recorder = small(tmp_path / "traces", salt_file=str(salt))
        await record(recorder, 2)
        assert recorder.recorded == 2
        assert stat.S_IMODE(salt.stat().st_mode) == 0o600
    assert len({read_salt(salt), salt.read_bytes()}) == 1
    assert caplog.text.count("its group could read it") == 1


async def test_a_salt_that_everybody_may_read_ends_it_with_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "salt").write_bytes(b"s" * 32)
    (tmp_path / "salt").chmod(0o644)
    recorder = small(tmp_path / "traces", salt_file=str(tmp_path / "salt"))
    recorder.open()
    await recorder.close()
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "others than its owner can read it" in caplog.text


async def test_two_stacks_that_begin_in_one_second_record_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.time, "strftime", lambda form, at: "20261126T120000Z")
    recorders = [small(tmp_path, max_bytes=4 << 20) for _ in range(3)]
    for recorder in recorders:
        await record(recorder, 20)
    assert [recorder.recorded for recorder in recorders] == [20] * 3
    assert sum(1 for path in files(tmp_path) for _ in read_lines(path)) == 60


async def test_files_from_a_year_ahead_go_before_those_of_today(tmp_path: Path) -> None:
    for number in range(1, 9):
        (tmp_path / f"trace-29990101T000000Z-1-{number:05}.jsonl.gz").write_bytes(bytes(32 << 10))
    past = tmp_path / "trace-20200101T000000Z-1-00001.jsonl.gz"
    past.write_bytes(bytes(1000))
    recorder = small(tmp_path)
    await record(recorder, 60)
    own = [path for path in files(tmp_path) if not path.name.startswith(("trace-2020", "trace-2999"))]
    lengths = [line.input_length for path in own for line in read_lines(path)]
    assert lengths == list(range(2401, 2461)), "all of this recorder's"
    assert past.exists()
    assert sum(path.stat().st_size for path in files(tmp_path)) <= 256 << 10


async def test_a_folder_that_was_removed_is_made_again(tmp_path: Path) -> None:
    folder = tmp_path / "traces"
    recorder = small(folder)
    recorder.open()
    recorder.record(keys(1), 16, 1, time.monotonic() - 60)
    recorder.wake()
    wait_for(recorder, 1)
    shutil.rmtree(folder)
    for number in range(2, 100):
        recorder.record([os.urandom(32) for _ in range(150)], 2400, 1, time.monotonic() - 60)
        recorder.wake()
        wait_for(recorder, number)
    await recorder.close()
    assert recorder.dropped == 0
    assert files(folder)

"""What policies have learned is kept over a restart, whole or not at all, and never keeps a stack from opening."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from support_following import FollowingLRU, Notes
from support_logs import complaints
from support_paths import SUPPORT

from faults.machine import warm
from faults.stepped import SteppedStack
from kvtier.cli import main
from kvtier.config import open_stack, parse_stack, stack_parts
from kvtier.config.load import StackConfig
from kvtier.policy import POLICIES, RequestModels
from kvtier.policy.base import MODEL_BYTES_MAX
from kvtier.stack import StackSettings
from kvtier.stack.learned.model_files import SAVE_SECONDS, ModelFiles, decode, encode, model_path, read, write
from kvtier.types.geometry import KVLayout
from kvtier.types.keys import RequestId, make_key

PAGE = 4096
LAYOUT = KVLayout.of_pages(PAGE, block_size=16)
NAMES = [make_key(n.to_bytes(16, "big"), 0) for n in range(4)]


@pytest.fixture(autouse=True)
def following(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(POLICIES, "following", lambda: FollowingLRU)


def config(root: Path, kind: str = "fs", state_dir: str = "") -> StackConfig:
    disk = {
        "fs": f"{{type: fs, roots: [{root}], capacity: 64MiB, min_free_bytes: 0, policy: following}}",
        "shared_fs": f"{{type: shared_fs, root: {root}, capacity: 64MiB}}",
    }
    tiers = ["{type: gpu}", f"{{type: cpu, cpu_bytes_to_use: {8 * PAGE}, policy: following}}"]
    return parse_stack(f"state_dir: '{state_dir}'\ntiers: [{', '.join([*tiers, *filter(None, [disk.get(kind)])])}]")


def engine(stack: StackConfig) -> SteppedStack:
    return SteppedStack(stack_parts(stack, LAYOUT, [torch.zeros((4, PAGE), dtype=torch.uint8)], model="m"))


def model(stack: SteppedStack) -> Notes:
    assert stack._assembled is not None
    (only,) = stack._assembled.plane.control.models
    assert isinstance(only, Notes)
    return only


def serve(stack: SteppedStack, count: int) -> None:
    for number in range(count):
        stack.request(RequestId(str(number)), NAMES).end(1)


@pytest.mark.parametrize("kind", ["fs", "shared_fs"])
def test_a_restart_goes_on_from_what_was_learned(tmp_path: Path, kind: str) -> None:
    root = tmp_path / "root"
    root.mkdir(mode=0o700)
    with engine(config(root, kind)) as stack:
        assert model(stack).begun == 0
        serve(stack, 3)
    path = model_path(root, "notes")
    assert path.stat().st_mode & 0o777 == 0o600
    with engine(config(root, kind)) as stack:
        assert model(stack).begun == 3
        stack.reset()
        serve(stack, 2)
    assert read(root, "notes") == b"notes 1 5"


def test_asyncio_programs_keep_it_too(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir(mode=0o700)

    async def serve_one() -> None:
        tensors = [torch.zeros((4, PAGE), dtype=torch.uint8)]
        async with open_stack(config(root), LAYOUT, tensors, model="m") as stack:
            stack.request(RequestId("1"), NAMES)

    asyncio.run(serve_one())
    asyncio.run(serve_one())
    assert read(root, "notes") == b"notes 1 2"


def test_without_a_disk_it_is_kept_in_state_dir_or_nowhere(tmp_path: Path) -> None:
    state = tmp_path / "state" / "kvtier"
    with engine(config(tmp_path, "none", str(state))) as stack:
        serve(stack, 4)
    assert read(state, "notes") == b"notes 1 4"
    with engine(config(tmp_path, "none")) as stack:
        assert stack._assembled is not None
        assert stack._assembled.models is None


def test_the_tools_take_the_file_for_ours(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = tmp_path / "root"
    root.mkdir(mode=0o700)
    for _ in range(2):
        with engine(config(root)) as stack:
            serve(stack, 1)
    assert model_path(root, "notes").is_file()
    assert complaints(caplog) == []
    result = CliRunner().invoke(main, ["fsck", str(root)])
    assert result.exit_code == 0, result.output
    assert "model-notes" not in result.output


def damaged(whole: bytes) -> dict[str, bytes]:
    return {
        "empty": b"",
        "cut": whole[:-1],
        "flipped": bytes([*whole[:-1], whole[-1] ^ 1]),
        "foreign": b"something else entirely, and longer than a head",
        "another model": encode("others", b"notes 1 7"),
        "another version of the model": encode("notes", b"notes 2 7"),
    }


@pytest.mark.parametrize("fault", damaged(b"x" * 9))
def test_a_file_that_is_not_good_is_one_line_in_the_log_and_the_model_begins_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    model_path(tmp_path, "notes").write_bytes(damaged(encode("notes", b"notes 1 7"))[fault])
    with engine(config(tmp_path, "none", str(tmp_path))) as stack:
        assert model(stack).begun == 0
        serve(stack, 1)
    (line,) = complaints(caplog)
    assert line.levelno == logging.WARNING
    assert str(model_path(tmp_path, "notes")) in line.getMessage()
    assert read(tmp_path, "notes") == b"notes 1 1"


@pytest.mark.parametrize("place", ["link", "folder", "fifo"])
def test_what_is_no_plain_file_is_not_followed(tmp_path: Path, caplog: pytest.LogCaptureFixture, place: str) -> None:
    path, other = model_path(tmp_path, "notes"), tmp_path / "other"
    other.write_bytes(encode("notes", b"notes 1 7"))
    {"link": lambda: path.symlink_to(other), "folder": path.mkdir, "fifo": lambda: os.mkfifo(path)}[place]()
    with engine(config(tmp_path, "none", str(tmp_path))) as stack:
        assert model(stack).begun == 0
    assert "is not used" in caplog.text
    assert other.read_bytes() == encode("notes", b"notes 1 7")


def test_a_folder_that_cannot_be_written_is_one_line_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    with engine(config(tmp_path, "none", str(tmp_path / "file"))) as stack:
        serve(stack, 1)
    assert "not kept over a restart" in caplog.text


def test_a_model_that_saves_too_much_is_not_written(tmp_path: Path) -> None:
    write(tmp_path, "notes", b"x" * MODEL_BYTES_MAX)
    assert read(tmp_path, "notes") == b"x" * MODEL_BYTES_MAX
    with pytest.raises(ValueError, match="is the most"):
        write(tmp_path, "notes", b"x" * (MODEL_BYTES_MAX + 1))


def test_a_running_stack_writes_now_and_then(tmp_path: Path) -> None:
    models = RequestModels([FollowingLRU])
    files = ModelFiles(tmp_path, models)

    async def story() -> None:
        for now in (100.0, 100.0 + SAVE_SECONDS / 2):
            files.save_if_due(now)
        assert files._writing is None
        files.save_if_due(100.0 + SAVE_SECONDS)
        assert files._writing is not None
        await asyncio.wrap_future(files._writing)
        assert read(tmp_path, "notes") == b"notes 1 0"
        await files.close(10.0)

    asyncio.run(story())


def test_a_disk_that_hangs_does_not_keep_a_stack_from_closing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Longer than `close_timeout_seconds`, up to what each tier is given, which is far more."""
    works_again = threading.Event()
    stack = engine(config(tmp_path, "").model_copy(update={"state_dir": str(tmp_path), "close_timeout_seconds": 0.5}))
    with stack, caplog.at_level(logging.WARNING):
        serve(stack, 1)
        monkeypatch.setattr("kvtier.stack.learned.model_files.write", lambda *_: works_again.wait())
        begun = time.monotonic()
        stack.close()
        took = time.monotonic() - begun
    works_again.set()
    assert took < StackSettings().tier_close_seconds / 2
    assert "could not be written" in caplog.text


WRITES_FOREVER = """
import sys
from pathlib import Path
from kvtier.stack.learned.model_files import write
print("begun", flush=True)
number = 0
while True:
    number += 1
    write(Path(sys.argv[1]), "notes", (b"%d " % number) * 200_000)
"""


def test_a_process_that_is_killed_leaves_the_old_file_or_the_new_one(tmp_path: Path) -> None:
    write(tmp_path, "notes", b"0 " * 200_000)
    for _ in range(5):
        command = [sys.executable, "-c", WRITES_FOREVER, str(tmp_path)]
        child = warm.Popen(command, stdout=subprocess.PIPE, cwd=SUPPORT)
        assert child.stdout is not None
        child.stdout.readline()
        seen = model_path(tmp_path, "notes").stat().st_mtime_ns
        while model_path(tmp_path, "notes").stat().st_mtime_ns == seen:
            assert child.poll() is None
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
        saved = read(tmp_path, "notes")
        assert saved is not None
        assert len(set(saved.split())) == 1


def test_what_was_sealed_comes_back_to_its_own_model_alone() -> None:
    assert decode("notes", encode("notes", b"abc")) == b"abc"
    with pytest.raises(ValueError, match="model 'notes'"):
        decode("others", encode("notes", b"abc"))

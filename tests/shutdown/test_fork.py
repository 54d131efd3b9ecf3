"""A stack belongs to the process that opened it: a forked child can neither use nor harm it."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
from support_counts import full_alone
from support_driver import Stepped
from support_shutdown import ENDS, IO_ENGINES, Lives, own_traceback, run_in_child
from support_shutdown_lives import BLOCKS, NAMES, cache, parts, runtime_of
from support_stack import Engine, statuses, whole

from faults.machine import warm
from faults.stepped import SteppedStack
from kvtier.errors import RootBusyError, UsageError
from kvtier.stack import TierStack
from kvtier.types.jobs import JobKind
from kvtier_fs import FSOptions
from kvtier_fs.local.folder import SlabFolder


@pytest.fixture(scope="module")
def lives(tmp_path_factory: pytest.TempPathFactory) -> Lives:
    return Lives(tmp_path_factory.mktemp("lives"))


USES = {
    "lookup": lambda stack: stack.lookup(NAMES),
    "locate": lambda stack: stack.locate(NAMES),
    "job": lambda stack: stack.job(JobKind.LOAD, [whole(NAMES)]),
    "request": lambda stack: stack.request("request", NAMES),
    "take_events": lambda stack: stack.take_events(),
    "announce": lambda stack: stack.engine.announce(NAMES),
    "stats": lambda stack: stack.stats(),
    "check_integrity": lambda stack: stack.check_integrity(),
    "geometry": lambda stack: stack.geometry,
    "open": lambda stack: stack.open(),
    "reset": lambda stack: stack.reset(),
}
TIER_USES = USES | {"drain": lambda stack: stack.drain(60.0), "close_on": lambda stack: stack.close_on(15)}


def refused(use, stack) -> str:
    """What a use in a child says; a coroutine is driven by hand, for a child has no loop of its own."""
    try:
        answer = use(stack)
        if asyncio.iscoroutine(answer):
            answer.send(None)
    except UsageError as error:
        return str(error)
    return "allowed"


def load_all(stack: Stepped, engine: Engine) -> list[str]:
    """Load every block to other GPU blocks through an engine's steps, comparing every byte."""
    one = whole(NAMES, len(NAMES))
    stack.submit(stack.job(JobKind.LOAD, [one]))
    while not (ended := stack.step()):
        assert stack.wait(30.0)
    assert not engine.wrong(one, ended[0].outcomes[0])
    return statuses(ended[0])


def store_all(stack: Stepped) -> None:
    stack.submit(stack.job(JobKind.STORE, [whole(NAMES)]))
    while not (ended := stack.step()):
        assert stack.wait(30.0)
    assert set(statuses(ended[0])) == {"stored"}


@pytest.mark.parametrize(
    "io_engine", ["threads", pytest.param("io_uring", marks=[*full_alone(), *IO_ENGINES[1].marks])]
)
def test_children_end_like_programs_through_their_parents_with_block(lives, tmp_path, io_engine):
    ended = lives.live("forked", tmp_path / "r", io_engine)
    assert ended.status == 0, ended
    assert ended.said[-1] == {"results": [[status, BLOCKS, 0] for status in ENDS.values()], "unfinished": 0}
    assert own_traceback(ended.stderr), ended.stderr
    shutil.rmtree(runtime_of(str(tmp_path / "r")))


@pytest.mark.parametrize("io_engine", IO_ENGINES)
async def test_a_child_of_an_asyncio_program_harms_nothing_of_it(tmp_path, io_engine):
    """Forked in a coroutine, it leaves with os._exit, as asyncio demands of every child."""
    engine = cache()
    async with TierStack(parts(engine, str(tmp_path / "r"), io_engine)) as stack:
        one, other = whole(NAMES), whole(NAMES, len(NAMES))
        assert set(statuses(await stack.run(stack.job(JobKind.STORE, [one])))) == {"stored"}

        def child() -> None:
            for name, use in TIER_USES.items():
                assert f"belongs to process {os.getppid()}" in refused(use, stack), name
            with pytest.raises(StopIteration):
                stack.close().send(None)
            with pytest.raises(StopIteration):
                stack.__aexit__(None, None, None).send(None)

        for _ in range(3):
            loading = asyncio.create_task(stack.run(stack.job(JobKind.LOAD, [other])))
            for _ in range(5):
                await asyncio.sleep(0)
            assert run_in_child(child) == 0
            result = await loading
            assert set(statuses(result)) == {"loaded"}
            assert not engine.wrong(other, result.outcomes[0])
    assert stack.close_report.unfinished_jobs == 0
    async with TierStack(parts(engine, str(tmp_path / "r"), io_engine)) as stack:
        assert stack.locate(NAMES) == ["fs"] * len(NAMES)


def test_a_child_may_open_a_stack_of_its_own_in_a_folder_of_its_own(tmp_path):
    engine = cache()
    with SteppedStack(parts(engine, str(tmp_path / "parent"), "threads")) as stack:
        store_all(stack)

        def child() -> None:
            own = cache()
            with pytest.raises(RootBusyError, match=f"process {os.getppid()}"):
                SteppedStack(parts(own, str(tmp_path / "parent"), "threads")).open()
            with SteppedStack(parts(own, str(tmp_path / "child"), "threads")) as mine:
                store_all(mine)
                assert set(load_all(mine, own)) == {"loaded"}

        assert run_in_child(child) == 0
        assert set(load_all(stack, engine)) == {"loaded"}


def test_a_stack_made_before_a_fork_may_be_opened_after_it(tmp_path):
    engine = cache()
    stack = SteppedStack(parts(engine, str(tmp_path / "r"), "threads"))

    def child() -> None:
        with stack:
            store_all(stack)

    assert run_in_child(child) == 0
    with stack:
        assert set(load_all(stack, engine)) == {"loaded"}, "what the child stored is found"


@contextmanager
def living_child() -> Iterator[None]:
    """A child forked here, with copies of all descriptors, that lives until the block ends."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.close(write)
        os.read(read, 1)
        os._exit(0)
    try:
        yield
    finally:
        os.close(write)
        os.close(read)
        os.waitpid(child, 0)


def test_a_root_is_free_once_closed_though_a_child_lives_on(tmp_path):
    engine = cache()
    with ExitStack() as children:
        with SteppedStack(parts(engine, str(tmp_path / "r"), "threads")):
            children.enter_context(living_child())
        with SteppedStack(parts(engine, str(tmp_path / "r"), "threads")):
            pass


def test_a_child_that_leaves_a_root_does_not_unlock_it(tmp_path):
    options = FSOptions(roots=[str(tmp_path / "r")], capacity=1 << 20)
    folder, other = SlabFolder(str(tmp_path / "r"), options), SlabFolder(str(tmp_path / "r"), options)
    assert folder.enter()
    assert folder.try_lock()
    assert other.enter()
    assert run_in_child(folder.leave) == 0
    assert not other.try_lock(), "the parent is the owner yet"
    folder.leave()
    assert other.try_lock()
    other.leave()


def test_a_program_that_is_executed_inherits_nothing(tmp_path):
    """Every descriptor is closed on exec: a subprocess that outlives the stack holds no lock and no memory."""
    engine = cache()
    with SteppedStack(parts(engine, str(tmp_path / "r"), "threads")):
        code = "import os\nfor fd in os.listdir('/proc/self/fd'):\n  print(os.path.realpath(f'/proc/self/fd/{fd}'))"
        command = [sys.executable, "-c", code]
        held = subprocess.run(command, close_fds=False, capture_output=True, text=True, check=True).stdout
    assert "/fd" in held
    assert str(tmp_path) not in held
    assert "memfd" not in held
    assert "kvtier" not in held


def test_a_root_is_free_once_its_killed_owner_has_but_a_living_child(tmp_path):
    """A child inherits the lock's open file, so it would hold the lock of a parent that can no longer give it up."""
    root = str(tmp_path / "r")
    owner = f"""
import os, sys, time
sys.path[:0] = {sys.path!r}
from support_shutdown_lives import cache, parts
from faults.stepped import SteppedStack
stack = SteppedStack(parts(cache(), {root!r}, "threads"))
stack.open()
child = os.fork()
if not child:
    time.sleep(60)
    os._exit(0)
print(child, flush=True)
time.sleep(60)
"""
    process = warm.Popen([sys.executable, "-W", "ignore", "-c", owner], stdout=subprocess.PIPE, text=True)
    child = int(process.stdout.readline())
    try:
        with pytest.raises(RootBusyError):
            SteppedStack(parts(cache(), root, "threads")).open()
        process.kill()
        process.wait(30)
        os.kill(child, 0)
        with SteppedStack(parts(cache(), root, "threads")) as stack:
            store_all(stack)
    finally:
        os.kill(child, signal.SIGKILL)
        process.kill()
        process.communicate(timeout=30)

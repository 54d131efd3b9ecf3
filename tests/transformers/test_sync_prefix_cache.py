"""The synchronous form: the same prefixes without an event loop, from any thread, to a clean end."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from support_counts import fully
from support_paths import SUPPORT
from support_shutdown import run_in_child
from support_transformers import (
    content,
    first_tokens,
    llama,
    needs_transformers,
    new_cache,
    prefill,
    prompt,
    same_bytes,
)
from support_transformers import stack as stack_of

import kvtier
from faults.machine import warm
from kvtier.aio.loop_thread import LoopThread
from kvtier.engines.transformers import PrefixCache
from kvtier.errors import ConfigError, UsageError
from kvtier.stack import StackStats

pytestmark = needs_transformers

STACK = """
tiers:
  - {type: cpu, cpu_bytes_to_use: 4MiB, huge_pages: false}
  - {type: fs, roots: [ROOT], capacity: 32MiB, min_free_bytes: 0, io_engine: threads, direct: "off"}
"""


def stack_file(folder: Path) -> Path:
    path = folder / "stack.yaml"
    path.write_text(STACK.replace("ROOT", str(folder / "root")))
    return path


def threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if "kvtier" in thread.name}


def test_a_prefix_is_saved_and_restored_over_a_restart(tmp_path: Path) -> None:
    model, tokens = llama(), prompt(100)
    computed = new_cache()
    prefill(model, tokens, computed)
    with PrefixCache(stack_file(tmp_path), model) as prefixes:
        assert prefixes.restore(tokens)[1] == 0
        assert prefixes.save(tokens, computed) == 96
        assert prefixes.drain(20)
        assert prefixes.stats().tiers["fs"].stored == 6
    assert not threads()
    with PrefixCache(stack_file(tmp_path), model) as prefixes:
        cache, count = prefixes.restore(torch.tensor([tokens]))
        assert count == 96
        assert same_bytes(cache, first_tokens(computed, 96))
        assert torch.equal(prefill(model, tokens, cache), prefill(model, tokens, first_tokens(computed, 96)))
        prefixes.reset()
        assert prefixes.restore(tokens)[1] == 0
    assert prefixes.stats().tiers["fs"].hits == 6
    assert not threads()


def test_figures_are_read_in_the_thread_that_changes_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with PrefixCache(stack_file(tmp_path), llama()) as prefixes:
        read, readers = prefixes._inner.stats, []

        def stats() -> StackStats:
            readers.append(threading.current_thread().name)
            return read()

        monkeypatch.setattr(prefixes._inner, "stats", stats)
        assert prefixes.stats().tiers["cpu"].stored == 0
    assert readers == ["kvtier-prefixes"]


def test_threads_may_share_a_prefix_cache(tmp_path: Path) -> None:
    with PrefixCache(stack_file(tmp_path), llama()) as prefixes:
        kv = prefixes.kv

        def chat(number: int) -> int:
            tokens, hits = prompt(60, seed=number % 3), 0
            for turn in range(5):
                cache, count = prefixes.restore(tokens)
                assert not count or same_bytes(cache, content(tokens[:count], kv))
                assert prefixes.save(tokens, content(tokens, kv)) == len(tokens) // 16 * 16
                tokens, hits = tokens + prompt(30, seed=number + turn), hits + count
            return hits

        with ThreadPoolExecutor(6) as pool:
            assert min(pool.map(chat, range(12))) > 0


def test_calls_before_opening_and_after_closing_are_refused(tmp_path: Path) -> None:
    prefixes = PrefixCache(stack_file(tmp_path), llama())
    prefixes.close()
    with pytest.raises(UsageError, match="not open"):
        prefixes.restore([1, 2, 3])
    prefixes.open()
    with pytest.raises(UsageError, match="opened once"):
        prefixes.open()
    prefixes.close()
    prefixes.close()
    with pytest.raises(UsageError, match="not open"):
        prefixes.restore([1, 2, 3])


def test_what_fails_to_open_leaves_nothing_behind(tmp_path: Path) -> None:
    with PrefixCache(stack_file(tmp_path), llama()):
        second = PrefixCache(stack_file(tmp_path), llama())
        before = threads()
        with pytest.raises(Exception, match="in use by"):
            second.open()
        assert threads() == before
        second.close()
    with pytest.raises(ConfigError, match="training mode"):
        PrefixCache(stack_file(tmp_path), llama().train()).open()
    assert not threads()


def test_a_child_forked_from_the_owner_is_told_so_and_leaves_the_stack_alone() -> None:
    with PrefixCache(stack_of(), llama()) as prefixes:
        tokens = prompt(40)
        prefixes.save(tokens, content(tokens, prefixes.kv))

        def child() -> None:
            with pytest.raises(UsageError, match="forked"):
                prefixes.restore(tokens)
            prefixes.close()

        with warnings.catch_warnings():
            # Newer Pythons warn of a fork beside threads; that the child does not wait for one is the point here.
            warnings.simplefilter("ignore", DeprecationWarning)
            assert run_in_child(child) == 0
        assert prefixes.restore(tokens)[1] == 32


@fully
def test_a_prefix_cache_left_open_is_closed_at_the_end_of_the_program(tmp_path: Path) -> None:
    script = f"""
import sys
sys.path.insert(0, {str(SUPPORT)!r})
from support_transformers import content, llama, prompt
from kvtier.engines.transformers import PrefixCache
prefixes = PrefixCache({str(stack_file(tmp_path))!r}, llama())
prefixes.open()
print(prefixes.save(prompt(100), content(prompt(100), prefixes.kv)))
"""
    command = [sys.executable, "-c", script]
    done = warm.run(command, whole_end=True, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (0, "96\n"), done.stderr
    with PrefixCache(stack_file(tmp_path), llama()) as prefixes:
        assert prefixes.restore(prompt(100))[1] == 96


class Interrupted(Exception):
    """What a signal handler of this test raises."""


def interrupt(*_: Any) -> None:
    raise Interrupted


def test_an_interrupted_call_ends_before_its_interruption_is_raised() -> None:
    """Until then its buffers are in use."""
    loop = LoopThread("kvtier-test", "prefix cache")
    loop.open()
    steps: list[str] = []
    begun = threading.Event()

    async def work() -> None:
        try:
            begun.set()
            await asyncio.Event().wait()
        finally:
            for _ in range(20):
                await asyncio.sleep(0)
            steps.append("ended")

    former = signal.signal(signal.SIGUSR1, interrupt)
    main = threading.get_ident()
    sender = threading.Thread(target=lambda: begun.wait(20) and signal.pthread_kill(main, signal.SIGUSR1))
    sender.start()
    try:
        with pytest.raises(Interrupted):
            loop.run(work)
        assert steps == ["ended"]
    finally:
        sender.join()
        signal.signal(signal.SIGUSR1, former)
        loop.close()


def test_a_call_under_way_when_the_loop_stops_is_told_so_and_so_is_a_later_one() -> None:
    loop = LoopThread("kvtier-test", "prefix cache")
    loop.open()
    begun = threading.Event()
    errors: list[BaseException] = []

    async def forever() -> None:
        begun.set()
        await asyncio.Event().wait()

    def wait() -> None:
        try:
            loop.run(forever)
        except UsageError as error:
            errors.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    assert begun.wait(20)
    loop.close()
    waiting.join(20)
    assert [str(error) for error in errors] == ["the prefix cache was closed before the call ended"]
    with pytest.raises(UsageError, match="is closed"):
        loop.run(forever)


def test_a_loop_of_ones_own_says_hints(tmp_path: Path) -> None:
    model, agent = llama(), prompt(100)
    computed = new_cache()
    prefill(model, agent, computed)
    with PrefixCache(stack_file(tmp_path), model) as prefixes:
        assert prefixes.hint(kvtier.Retain(prefixes.keys(agent), 300.0, "agent")).refused == {
            kvtier.HintRefusal.NOT_FOUND: 6
        }
        prefixes.save(agent, computed)
        assert prefixes.hint(kvtier.Retain(prefixes.keys(agent), 300.0, "agent")) == kvtier.HintResult(6)
        assert prefixes.stats().hints.retained_sets == 1
        assert prefixes.hint(kvtier.Release("agent")) == kvtier.HintResult(6)

"""Programs ended in every way with transfers under way, closes at any point, children that use what is not theirs."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support_shutdown import ENDS, Ended, Lives, first_word, own_traceback, quiet, right_bytes_or_misses, run_in_child
from support_shutdown_lives import BLOCKS, NAMES, busy_engine_stack, busy_tier_stack, cache, process_stack
from support_stack import whole

from kvtier.types.jobs import JobKind
from kvtier_fs.io.uring import probe_uring
from tests.shutdown.test_fork import TIER_USES, load_all, refused, store_all
from tests.shutdown.test_process_stack import USES

TURNS_MAX = 400
CLOSES_WITHIN_SECONDS = 60.0


class Ends:
    """Each method lets one life end and judges what it left on its root."""

    def __init__(self, budget: Any, tally: Any) -> None:
        self.rng, self.tally, self.folder = random.Random(budget.seed), tally, budget.folder
        self.lives = Lives(budget.folder)
        self.engines = ["threads"] if probe_uring() else ["threads", "io_uring"]
        self._number = 0

    def run(self, count: int) -> None:
        ways = [self.program, self.closed_asyncio, self.signalled, self.child, self.interrupted, self.closed_engine]
        for number in range(count):
            root = self.folder / f"life-{number}"
            way = ways[number % len(ways)]
            io_engine = self.rng.choice(self.engines)
            before = len(self.tally.problems)
            try:
                asyncio.run(way(root, io_engine))
            except AssertionError as broken:
                self.tally.wrong_bytes += 1
                self.tally.expect(False, repr(broken))
            except TimeoutError:
                self.tally.hangs += 1
            if len(self.tally.problems) > before:
                self.tally.expect(False, f"that was {way.__name__} on {io_engine}, life {number}")
            shutil.rmtree(root, ignore_errors=True)
            self.tally.iterations += 1

    def _judge(self, ended: Ended, status: int, noise: Callable[[str], bool] = quiet) -> None:
        self.tally.hangs += ended.status is None
        self.tally.expect(ended.status == status, f"status {ended.status} instead of {status}: {ended.stderr[-500:]}")
        self.tally.expect(noise(ended.stderr), f"it said: {ended.stderr[-500:]}")

    async def _found(self, root: Path, io_engine: str) -> int:
        """Reopen, load all, compare every byte; the root must be free, too."""
        found = await right_bytes_or_misses(root, io_engine)
        self.tally.notes["blocks compared after reopening"] += found
        return found

    async def program(self, root: Path, io_engine: str) -> None:
        """A program leaves by its end, by exit or by an exception, with or without closing."""
        life = self.rng.choice(("engine_unclosed", "tier_unclosed", "engine_closed", "tier_closed"))
        how = self.rng.choice(("end", "exit", "raise"))
        ended = self.lives.live(life, root, io_engine, how)
        self._judge(ended, ENDS[how], own_traceback if how == "raise" else quiet)
        self.tally.notes["programs that ended with transfers under way"] += bool(
            ended.said and ended.said[0]["running"]
        )
        found = await self._found(root, io_engine)
        if life == "tier_closed":
            self.tally.expect(found == BLOCKS, f"closing lost {BLOCKS - found} blocks")

    async def signalled(self, root: Path, io_engine: str) -> None:
        """SIGTERM to a stack that was asked to close on it: everything owed is on disk first."""
        how, status = self.rng.choice((("default", -signal.SIGTERM), ("ignore", 0), ("handler", 0)))
        said = self.lives.begin("signalled", root, io_engine, how)
        pid = await first_word(said, "pid")
        await asyncio.sleep(self.rng.random() * 0.03)
        os.kill(pid, signal.SIGTERM)
        self._judge(self.lives.end(), status)
        self.tally.notes["signals"] += 1
        found = await self._found(root, io_engine)
        self.tally.expect(found == BLOCKS, f"SIGTERM lost {BLOCKS - found} blocks")

    async def interrupted(self, root: Path, io_engine: str) -> None:
        """Ctrl-C or SIGTERM that nobody handles, at a random moment of endless loads."""
        kind, sent = self.rng.choice(("engine", "tier")), self.rng.choice((signal.SIGINT, signal.SIGTERM))
        said = self.lives.begin("interrupted", root, io_engine, kind)
        pid = await first_word(said, "pid")
        await asyncio.sleep(self.rng.random() * 0.05)
        os.kill(pid, sent)
        self._judge(self.lives.end(), -sent, lambda stderr: ("KeyboardInterrupt" in stderr) == (sent == signal.SIGINT))
        self.tally.notes["signals"] += 1
        await self._found(root, io_engine)

    async def closed_asyncio(self, root: Path, io_engine: str) -> None:
        """`close` after any number of turns of the loop: it drains or reports, and every waiter gets an answer."""
        stack, tasks = await busy_tier_stack(str(root), io_engine)
        for _ in range(self.rng.randrange(TURNS_MAX)):
            await asyncio.sleep(0)
        pending = sum(not task.done() for task in tasks)
        async with asyncio.timeout(CLOSES_WITHIN_SECONDS):
            await stack.close()
            await asyncio.gather(*tasks, return_exceptions=True)
        await self._closed(stack, root, io_engine, pending)

    async def closed_engine(self, root: Path, io_engine: str) -> None:
        """The same for a synchronous engine, after any number of steps: its stack process keeps what it stored."""
        stack = await asyncio.to_thread(busy_engine_stack, str(root), io_engine)
        for _ in range(self.rng.randrange(TURNS_MAX // 10)):
            stack.step()
        pending = stack.has_pending_work
        begun = time.monotonic()
        await asyncio.to_thread(stack.close)
        self.tally.hangs += time.monotonic() - begun > CLOSES_WITHIN_SECONDS
        await self._closed(stack, root, io_engine, pending)

    async def _closed(self, stack: Any, root: Path, io_engine: str, pending: int) -> None:
        report = stack.close_report
        self.tally.notes["closes with calls under way"] += bool(pending)
        self.tally.notes["blocks dropped and reported by close"] += report.dropped_blocks
        self.tally.expect(report.unfinished_jobs == 0, f"{report} on a healthy disk")
        stack.check_integrity()
        await self._found(root, io_engine)

    async def child(self, root: Path, io_engine: str) -> None:
        """A child made by fork may use nothing, harms nothing, and its parent goes on."""
        await (self._child_of_engine if self.rng.random() < 0.5 else self._child_of_tier)(root, io_engine)
        self.tally.notes["children that tried every use"] += 1

    async def _child_of_engine(self, root: Path, io_engine: str) -> None:
        await asyncio.to_thread(self._engine_with_child, root, io_engine)
        self.tally.expect(await self._found(root, io_engine) == BLOCKS, "blocks were lost")

    def _engine_with_child(self, root: Path, io_engine: str) -> None:
        engine = cache()
        with process_stack(engine, str(root), io_engine) as stack:
            store_all(stack)
            stack.submit(stack.job(JobKind.LOAD, [whole(NAMES, len(NAMES))]))
            for _ in range(self.rng.randrange(20)):
                stack.step()

            def child() -> None:
                for name, use in USES.items():
                    assert f"belongs to process {os.getppid()}" in refused(use, stack), name
                assert stack.close().unfinished_jobs == 0

            self.tally.expect(run_in_child(child) == 0, "a child was allowed what it must not, or hung")
            while stack.has_pending_work:
                stack.step()
                stack.wait(0.1)
            assert set(load_all(stack, engine)) == {"loaded"}

    async def _child_of_tier(self, root: Path, io_engine: str) -> None:
        stack, tasks = await busy_tier_stack(str(root), io_engine)
        for _ in range(self.rng.randrange(TURNS_MAX)):
            await asyncio.sleep(0)

        def child() -> None:
            for name, use in TIER_USES.items():
                assert f"belongs to process {os.getppid()}" in refused(use, stack), name

        self.tally.expect(run_in_child(child) == 0, "a child was allowed what it must not")
        results = await asyncio.gather(*tasks)
        self.tally.notes["calls that went on over a fork"] += len(results)
        async with asyncio.timeout(CLOSES_WITHIN_SECONDS):
            await stack.close()
        self.tally.expect(await self._found(root, io_engine) == BLOCKS, "blocks were lost")


def shutdown_and_fork(budget: Any, tally: Any) -> Any:
    """`count` lives, the six ways in turn."""
    ends = Ends(budget, tally)
    ends.run(budget.count)
    tally.expect(budget.count < 6 or tally.notes["closes with calls under way"] > 0, "no close had anything under way")
    return tally

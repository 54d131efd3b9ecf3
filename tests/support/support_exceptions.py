"""Stacks under exceptions at any line of the product and out of signal handlers."""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import logging
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

from support_stack import PLAIN, Engine, fs, keys, parts_of, stack_file, whole
from support_stack_tiers import LOAD, STORE

from faults.machine.belongings import belongings, new_since
from faults.machine.raising import LineFault, interrupted
from kvtier.errors import KVTierError
from kvtier.stack import EngineStack, TierStack

JOB_SECONDS = 2.0
GRACE_SECONDS = 4.0
"""What a call may take beyond its deadline: the stack's grace, and the tracing of every line."""
CLOSE_SECONDS = 30.0
ROWS = 8
NAMES = keys(16)
CALLS = ("open", "store", "load", "lookup", "reset", "close")
CALLS_PER_LIFE = 6
ENDS_SHARE = 0.5
LEAK_SECONDS = 3.0
HANG_SECONDS = 90.0
LIVES_BETWEEN_LOOKS = 5
LIVES_ON_A_ROOT = 50


class Interruption(Exception):
    """What a signal handler of a program raises."""


INJECTED = (MemoryError, Interruption, KeyboardInterrupt)


class Rounds:
    """One stack each: a phase of its life is struck once, and every promise is looked at afterwards."""

    def __init__(self, budget: Any, tally: Any) -> None:
        self.rng, self.tally, self.folder, self.seed = random.Random(budget.seed), tally, budget.folder, budget.seed
        self.fault = LineFault()
        self.engine = Engine(PLAIN, 32)
        self.lines: dict[tuple[str, str], int] = {}
        self.roots, self.lives_on_root = 0, LIVES_ON_A_ROOT
        self.struck: list[str] = []

    # -- what is struck ------------------------------------------------------------------------------------------

    def strike(self, how: str, face: str, phase: str) -> Any:
        """The context in which a phase runs."""
        if how == "line":
            return self._at_a_line(face, phase)
        error = self.rng.choice([Interruption, MemoryError, KeyboardInterrupt])
        return interrupted(self.rng.random() * self.lines.get((face, phase), 1) * 2e-6, error)

    @contextmanager
    def _at_a_line(self, face: str, phase: str) -> Iterator[None]:
        most = self.lines.get((face, phase))
        self.fault.arm(-1 if most is None else self.rng.randrange(most + 1))
        try:
            yield
        finally:
            lines = self.fault.disarm()
            self.struck.append(self.fault.where)
            if most is None:
                self.lines[face, phase] = lines

    # -- judging -------------------------------------------------------------------------------------------------

    def ended(self, what: str, began: float, limit: float) -> None:
        took = time.monotonic() - began
        self.tally.hangs += took > limit
        self.tally.expect(took <= limit, f"{what} took {took:.1f} s")

    def note(self, context: dict[str, Any]) -> None:
        """What the loop caught: only what was raised into it."""
        error = context.get("exception")
        known = isinstance(error, INJECTED)
        self.tally.notes["exceptions that reached the loop"] += 1
        self.tally.expect(known, f"{self.what} at {self.fault.where}: {context['message']}: {error!r}")

    def stuck(self, tasks: list[str]) -> None:
        """Tasks that a closed stack left in its loop, where a program would wait for them for ever."""
        self.tally.hangs += bool(tasks)
        self.tally.expect(
            not tasks,
            f"{self.what} at {self.fault.where}, struck at {self.struck}: after closing the loop still has {tasks}",
        )

    def compare(self, one: Any, result: Any) -> None:
        wrong = self.engine.wrong(one, result.outcomes[0])
        self.tally.wrong_bytes += len(wrong)
        self.tally.expect(not wrong, f"{self.what}: {wrong[:2]}")
        self.tally.notes["blocks loaded and compared"] += sum(outcome.ok for outcome in result.outcomes[0])

    def left(self, before: Any) -> None:
        until = time.monotonic() + LEAK_SECONDS
        while (left := new_since(before)) and time.monotonic() < until:
            time.sleep(0.02)
        self.tally.leaks += len(left)
        if left:
            self.lives_on_root = LIVES_ON_A_ROOT
            before.update(belongings() - before)
        self.tally.expect(not left, f"{self.what}, struck at {self.struck}, left behind {left}")
        self.struck.clear()

    # -- one life ------------------------------------------------------------------------------------------------

    def run(self, count: int, how: str, face: str) -> None:
        """Strike `count` calls. Several in one life, as long as the stack has not failed."""
        self.what = f"{how} {face}, calibration"
        self._life(face, "line", CALLS)
        number = lives = 0
        before = belongings()
        while number < count:
            calls = [self.rng.choice(CALLS)] if self.rng.random() < ENDS_SHARE else []
            calls += self.rng.choices(CALLS[1:-1], k=CALLS_PER_LIFE)
            calls = calls[: count - number]
            self.what = f"{how} {face}, from round {number} of seed {self.seed} on"
            struck = self._life(face, how, calls)
            number, lives = number + struck, lives + 1
            if lives % LIVES_BETWEEN_LOOKS == 0 or number >= count:
                self.left(before)
            self.tally.iterations += struck
            self.tally.notes[f"calls struck, {how}, {face}"] += struck
            self.tally.notes[f"stacks, {how}, {face}"] += 1

    def _life(self, face: str, how: str, calls: Sequence[str]) -> int:
        """Open a stack, strike these calls of it, and close it. Returns how many were struck."""
        faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
        if self.lives_on_root >= LIVES_ON_A_ROOT:  # or it may be locked by what was left behind
            self.roots, self.lives_on_root = self.roots + 1, 0
        root = self.folder / f"{face}-{self.roots}"
        self.lives_on_root += 1
        parts = parts_of(
            stack_file(PLAIN, ROWS, fs(root, capacity=1 << 20, job_timeout_seconds=1.0)),
            self.engine, load_seconds=JOB_SECONDS, store_seconds=JOB_SECONDS, tier_close_seconds=5.0, close_seconds=2.0,
        )  # fmt: skip
        life, struck = FACES[face](parts, self), 0
        with self.fault.installed() if how == "line" else nullcontext():
            try:
                struck = self._live(life, how, face, calls)
            finally:
                life.end()
        self.tally.notes[f"stacks that failed, {how}, {face}"] += life.failed
        faulthandler.cancel_dump_traceback_later()
        return struck

    def _live(self, life: Any, how: str, face: str, calls: Sequence[str]) -> int:
        def fault(name: str) -> Callable[[], Any] | None:
            return (lambda: self.strike(how, face, name)) if name in calls else None

        struck = [name for name in ("open", "close") if name in calls]
        if not self.call("open", life.open, fault("open"), CLOSE_SECONDS):
            return 1
        for start in (0, 8):
            self.store(life, NAMES[start : start + 8], None)
            life.settle()
        for name in calls:
            if name in ("store", "load", "lookup", "reset"):
                struck.append(name)
                self.one_call(life, name, fault(name))
            if life.failed:
                break
        self.store(life, NAMES[:8], None)
        self.load(life, NAMES[:8], None)
        self.call("close", life.close, fault("close"), CLOSE_SECONDS)
        return len(struck)

    def one_call(self, life: Any, name: str, fault: Callable[[], Any] | None) -> None:
        if name == "store":
            self.store(life, keys(8, start=self.rng.randrange(64)), fault)
        elif name == "load":
            self.load(life, NAMES, fault)
        elif name == "lookup":
            self.call(name, lambda: life.lookup(NAMES), fault)
        elif self.call(name, life.reset, fault):
            result = self.load(life, NAMES, None)
            stale = result is not None and any(outcome.ok for outcome in result.outcomes[0])
            self.tally.wrong_bytes += stale
            self.tally.expect(not stale, f"{self.what}: blocks from before a reset")
            for start in (0, 8):
                self.store(life, NAMES[start : start + 8], None)
                life.settle()

    def store(self, life: Any, names: Any, fault: Callable[[], Any] | None) -> None:
        self.engine.compute(whole(names))
        self.call("store", lambda: life.move(STORE, whole(names)), fault)

    def load(self, life: Any, names: Any, fault: Callable[[], Any] | None) -> Any:
        self.engine.wipe()
        result: list[Any] = []
        self.call("load", lambda: result.append(life.move(LOAD, whole(names))), fault)
        if result:
            self.compare(whole(names), result[0])
        return result[0] if result else None

    def call(
        self, name: str, work: Callable[[], Any], fault: Callable[[], Any] | None,
        limit: float = JOB_SECONDS + GRACE_SECONDS,
    ) -> bool:  # fmt: skip
        """One call of an embedder. It ends in time: as it should, by a typed error, or by what was raised into it."""
        began = time.monotonic()
        try:
            if fault is None:
                work()
            else:
                with fault():
                    work()
        except (*INJECTED, KeyError) as error:
            # `threading.Thread.start`, interrupted, raises KeyError for a thread that has begun and ended already
            if isinstance(error, KeyError) and not isinstance(error.__context__, INJECTED):
                raise
            raised = fault is not None
            self.tally.expect(raised, f"{self.what} at {self.fault.where}: {name} raised {error!r}")
            self.tally.notes["calls that raised what was raised into them"] += 1
            return False
        except KVTierError as error:
            self.tally.notes[f"calls refused: {type(error).__name__}"] += 1
            return False
        except TimeoutError:
            self.tally.hangs += 1
            self.tally.expect(False, f"{self.what} at {self.fault.where}: {name} hung")
            return False
        finally:
            self.ended(f"{self.what} at {self.fault.where}: {name}", began, limit)
        return True


class TierFace:
    """A `TierStack` in a loop that runs while a call is made."""

    def __init__(self, parts: Any, rounds: Rounds) -> None:
        self.stack, self.rounds = TierStack(parts), rounds
        self.runner = asyncio.Runner()
        self.runner.get_loop().set_exception_handler(lambda loop, context: rounds.note(context))

    def _run(self, work: Any, limit: float = CLOSE_SECONDS) -> Any:
        return self.runner.run(asyncio.wait_for(work, limit))

    def open(self) -> None:
        self._run(self.stack.open())

    def move(self, kind: Any, one: Any) -> Any:
        call = self.stack.load if kind is LOAD else self.stack.store
        return self._run(call(self.stack.job(kind, [one])))

    def lookup(self, names: Any) -> None:
        self._run(self.stack.lookup(names))

    def settle(self) -> None:
        with suppress(KVTierError):
            self._run(self.stack.drain(2.0))

    def reset(self) -> None:
        self._run(self.stack.reset())

    def close(self) -> None:
        self._run(self.stack.close())

    @property
    def failed(self) -> bool:
        return self.stack._assembled is not None and self.stack._assembled.plane is self.stack._failed

    def end(self) -> None:
        loop = self.runner.get_loop()
        try:
            with suppress(*INJECTED):  # a second close says what the first did
                self.close()
        finally:
            self._run(asyncio.sleep(0))
            stuck = asyncio.all_tasks(loop)
            self.rounds.stuck([str(task.get_coro()) + str(task.get_stack()) for task in stuck])
            if stuck:
                loop.close()  # a runner would wait for them
            else:
                self.runner.close()


class EngineFace:
    """An `EngineStack` as an engine drives it that goes on after an exception."""

    def __init__(self, parts: Any, rounds: Rounds) -> None:
        self.stack = EngineStack(parts)

    def open(self) -> None:
        self.stack.open()

    def move(self, kind: Any, one: Any) -> Any:
        job = self.stack.job(kind, [one])
        self.stack.submit(job)
        until = time.monotonic() + CLOSE_SECONDS
        raised: BaseException | None = None
        while time.monotonic() < until:
            try:
                for result in self.stack.step():
                    if result.job_id == job.job_id:
                        return result
                self.stack.wait(0.5)
            except INJECTED as error:
                if raised is not None:
                    raise
                raised = error
        raise TimeoutError

    def lookup(self, names: Any) -> None:
        self.stack.lookup(names)

    def settle(self) -> None:
        until = time.monotonic() + 2.0
        with suppress(KVTierError):
            while self.stack.has_pending_work and time.monotonic() < until:
                self.stack.step()
                self.stack.wait(0.05)

    def reset(self) -> None:
        self.stack.reset(5.0)

    def close(self) -> None:
        self.stack.close()

    failed = TierFace.failed

    def end(self) -> None:
        self.stack.close()


FACES: dict[str, Any] = {"TierStack": TierFace, "EngineStack": EngineFace}


def memory_errors(budget: Any, tally: Any) -> Any:
    """`count` rounds: MemoryError at a line, and exceptions out of signal handlers."""
    logging.getLogger("kvtier").setLevel(logging.CRITICAL + 1)
    gc.collect()
    gc.freeze()  # what was imported is not looked through again and again
    rounds = Rounds(budget, tally)
    ways = [("line", "TierStack"), ("line", "EngineStack"), ("signal", "EngineStack")]
    for number, (how, face) in enumerate(ways):
        share = budget.count // len(ways) + (number < budget.count % len(ways))
        if share:
            rounds.run(share, how, face)
    return tally

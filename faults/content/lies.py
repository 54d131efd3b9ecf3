"""Roots whose records lie under checksums that hold: opened, used, checked, repaired and closed, in one process.

Each round writes a root anew, with lies in some of its records, and runs tools and a whole stack on it. All of it ends
within seconds, with typed errors only, in little more memory than an undamaged root takes, and lets the root go.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import support_stack
from support_tools import tool

from kvtier.config import stack_parts
from kvtier.errors import IntegrityError, KVTierError
from kvtier.stack import StackParts, TierStack
from kvtier.tier.contract import LoadStore
from kvtier.types.keys import OffloadKey
from kvtier.types.namespace import Namespace
from kvtier_fs import SharedFSBackend
from kvtier_fs.shared.leases import FolderLeases, this_process
from simulator.records import ForgedRecord, Record, forge_records

from ..attack import Budget, Tally
from ..machine import warm
from .records import files_records, slab_records
from .stored import LAYOUTS, held
from .watched import TookLong, Watch, contained, open_below, peak, peak_reset

CAPACITY = {"slab": 2 << 20, "files": 4 << 20}
ROOTS = {"slab": ("a", "b"), "files": ("a",)}
"""The folders of a tier: two disks, or one that is shared."""
BLOCKS = 12
"""Of each of two groups and in each of two namespaces."""
OPERATIONS = 50
STEP_SECONDS = 20.0
CLI_SECONDS = 60.0
"""Of a process that has to start first, perhaps beside many others."""
MEMORY_BYTES = 256 << 20
LIES_AT_ONCE = (1, 1, 2, 4, 8, 16, 32, 64)
CLI_EVERY = 250
AGAIN_EVERY = 16
ENDED, LIVING = "0123456789abcdef", "fedcba9876543210"
"""The leases of a process that has ended and of one that has not."""
SHAPE = "full:page=4096,block=16"
"""A layout that the command line of `check` can name; what is stored is of another."""
TOOLS = tuple(
    line.split() for line in ("check", "ls", "ls --all --json", "du", "du --by region", "fsck", "gc --old --dry-run")
)
CHANGES = (["fsck", "--repair"], ["gc", "--old"])
_CLI = "import sys; from kvtier.cli import main; main(sys.argv[1:])"
_GPU_BLOCKS = 4


@dataclass(slots=True)
class Template:
    """The roots of a tier as they were closed, and their records."""

    folder: Path
    files: dict[str, bytes]
    folders: list[str]
    records: list[Record]

    def restore(self) -> None:
        """Write the roots as they were, whatever lies there."""
        shutil.rmtree(self.folder, ignore_errors=True)
        for name in ("", *self.folders):
            (self.folder / name).mkdir(mode=0o700)
        for name, data in self.files.items():
            (self.folder / name).write_bytes(data)


class Liar:
    """The rounds on one layout."""

    def __init__(self, tally: Tally, layout: str, folder: Path) -> None:
        self.tally, self.layout, self.watch = tally, layout, Watch()
        self.engine = support_stack.Engine(support_stack.HYBRID, BLOCKS * _GPU_BLOCKS)
        self.keys = [key for group in (0, 1) for key in support_stack.keys(BLOCKS, group)]
        self.folder = folder / layout
        self.roots = [self.folder / name for name in ROOTS[layout]]
        self.root = self.roots[0]
        self.folder.mkdir(mode=0o700)
        self.stack_file = folder / f"{layout}.yaml"
        self.stack_file.write_text(json.dumps({"tiers": [{"type": "cpu", "cpu_bytes_to_use": 1 << 20}, self._tier()]}))
        self.template = self._make()
        self.most_bytes = 0
        self.doing = ""

    # -- roots -------------------------------------------------------------------------------------------------------

    def _make(self) -> Template:
        """A root with blocks of two namespaces, closed in order."""
        for model in ("other", "test"):
            asyncio.run(self._fill(model))
        if self.layout == "files":
            self._leave_behind()
        there = sorted(self.folder.rglob("*"))
        files = {str(one.relative_to(self.folder)): one.read_bytes() for one in there if one.is_file()}
        folders = [str(one.relative_to(self.folder)) for one in there if one.is_dir()]
        records = []
        for root in self.roots:
            own = {name.removeprefix(f"{root.name}/"): data for name, data in files.items() if name[0] == root.name}
            found = (slab_records if self.layout == "slab" else files_records)(own)
            records += [replace(record, file=f"{root.name}/{record.file}") for record in found]
        return Template(self.folder, files, folders, records)

    def _leave_behind(self) -> None:
        """What processes that ended, and one that did not, leave: leases and a temporary."""
        fd = os.open(self.root / "leases", os.O_RDONLY | os.O_DIRECTORY)
        try:
            for name, pid in ((ENDED, 2**22), (LIVING, os.getpid())):
                FolderLeases(fd, name, replace(this_process(), pid=pid), time.monotonic, 60.0).take()
        finally:
            os.close(fd)
        (self.root / "bucket-00" / f"new-{ENDED}-1").write_bytes(bytes(4096))

    def _tier(self) -> dict[str, object]:
        if self.layout == "slab":
            return support_stack.fs(*self.roots, capacity=CAPACITY["slab"])
        return support_stack.shared_fs(self.root, capacity=CAPACITY["files"])

    def _parts(self, model: str = "test") -> StackParts:
        config = support_stack.stack_file(support_stack.HYBRID, 16, self._tier())
        return stack_parts(config, Namespace(support_stack.HYBRID, model=model), self.engine.kv_caches)

    async def _fill(self, model: str) -> None:
        async with TierStack(self._parts(model)) as stack:
            for group in (0, 1):
                one = support_stack.whole(support_stack.keys(BLOCKS, group), 0, _GPU_BLOCKS)
                stored = await support_stack.store(stack, self.engine, one)
                assert all(outcome.ok for outcome in stored.outcomes[0]), stored
                assert await stack.drain(20.0)

    # -- steps -------------------------------------------------------------------------------------------------------

    @contextmanager
    def step(self, doing: str, seconds: float = 0.0) -> Iterator[None]:
        """Something that has so many seconds and may raise typed errors only."""
        self.doing, self.watch.late, begun = doing, False, time.monotonic()
        signal.setitimer(signal.ITIMER_REAL, seconds or STEP_SECONDS)
        try:
            yield
        except TookLong:
            pass
        except IntegrityError as error:
            self.wrong(f"ended with {error!r}")
        except KVTierError:
            self.tally.notes[f"typed errors of {doing.partition(' ')[0]}"] += 1
        except Exception as error:  # the boundary of an attack: whatever it is, it should not have been raised
            self.wrong(f"ended with {type(error).__name__}: {error}")
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        if self.watch.late:
            self.tally.hangs += 1
            self.wrong(f"did not end within {seconds or STEP_SECONDS:g} s")
        name = f"milliseconds of {doing.partition(' ')[0]}, at most"
        self.tally.notes[name] = max(self.tally.notes[name], round((time.monotonic() - begun) * 1000))

    def wrong(self, problem: str) -> None:
        """Record a problem with what is needed to repeat it."""
        self.tally.expect(False, f"{self.layout} {self.context}: {self.doing}: {problem[:600]}")

    context = ""

    def run_tool(self, arguments: list[str]) -> None:
        """A tool on the root, in this process. It ends with 0, 1 or 2 and raises nothing."""
        with self.step(f"{arguments[0]} {' '.join(arguments[1:])}"):
            result = tool(*self._command(arguments))
            if result.exception is not None and not isinstance(result.exception, SystemExit) and not self.watch.late:
                self.wrong(f"ended with {result.exception!r}")
            elif result.exit_code == 2:
                self.tally.notes[f"refusals of {arguments[0]}"] += 1
                if not all(line.startswith(("error: ", "note: ")) for line in result.stderr.splitlines()):
                    self.wrong(f"refused without a reason: {result.stderr[:200]}")

    def _command(self, arguments: list[str]) -> list[str | Path]:
        """The whole command line of a tool: `check` reads a stack file, the others a root."""
        return [*arguments, self.stack_file, "--layout", SHAPE] if arguments == ["check"] else [*arguments, self.root]

    def run_cli(self, rng: random.Random) -> None:
        """A tool as an operator runs it."""
        arguments = rng.choice(TOOLS)
        with self.step(f"CLI {arguments[0]}", CLI_SECONDS):
            command = [sys.executable, "-c", _CLI, *map(str, self._command(arguments))]
            done = warm.run(command, capture_output=True, text=True, check=False)
            if done.returncode not in (0, 1, 2) or "Traceback" in done.stderr:
                self.wrong(f"status {done.returncode}: {done.stderr[-400:]}")
        self.tally.notes["runs of the command line"] += 1

    def use(
        self, rng: random.Random, operations: int, forged: bool, meanwhile: Callable[[], None] = lambda: None
    ) -> int:
        """Open a stack on the root, use it, close it. Returns how many blocks were loaded. `meanwhile`: half-way."""
        loaded = 0

        async def work() -> None:
            nonlocal loaded
            asyncio.get_running_loop().set_exception_handler(self.watch.loop_error)
            parts = self._parts()
            stack = TierStack(parts)
            await stack.open()
            self._check_down(stack)
            try:
                for number in range(operations):
                    if number == operations // 2:
                        meanwhile()
                        await _sweep(parts.tiers[-1])
                    loaded += await self._operate(rng, stack, forged)
                await stack.drain(2.0)
                stack.check_integrity()
                self.tally.notes["stacks used"] += 1
            finally:
                await stack.close()

        with self.step("stack"):
            asyncio.run(work())
        return loaded

    def _check_down(self, stack: TierStack) -> None:
        """A tier whose root is damaged is down with one line in the log, which belongs to the opening."""
        assert stack._assembled is not None
        down = [lower for lower in stack._assembled.plane.control.lowers if lower.spec.held_back]
        lines = [line for line in self.watch.seen if line.startswith("tier fs is down: ")]
        self.watch.seen[:] = [line for line in self.watch.seen if line not in lines]
        self.tally.notes["tiers down"] += len(down)
        if len(lines) != len(down):
            self.wrong(f"{len(down)} tiers are down, and the log says {lines}")

    async def _operate(self, rng: random.Random, stack: TierStack, forged: bool) -> int:
        """One operation. Returns how many blocks it loaded."""
        group, what = rng.randrange(2), rng.random()
        start = rng.randrange(BLOCKS - 4)
        names = support_stack.keys(rng.randrange(1, 5), group, start + (100 if what < 0.3 else 0))
        one = support_stack.whole(names, 0, _GPU_BLOCKS)
        self.tally.notes["operations"] += 1
        if what < 0.45:
            await support_stack.store(stack, self.engine, one, timeout_seconds=5.0)
        elif what < 0.8:
            return await self._load(stack, one, names, forged)
        elif what < 0.95:
            await stack.lookup(names)
        elif what < 0.98:
            stack.stats()
        else:
            await self._reset(stack)
        return 0

    async def _reset(self, stack: TierStack) -> None:
        """A reset that a lie keeps from being durable raises, and says so as one error in the log: it belongs to it."""
        before, lines_due = len(self.watch.seen), int(stack._log.has_room("reset"))
        try:
            await stack.reset()
        except KVTierError:
            lines = self.watch.seen[before:]
            said = [line for line in lines if line.startswith("event=reset ") and " durable=no " in line]
            self.watch.seen[before:] = [line for line in lines if line not in said]
            if len(said) != lines_due:
                self.wrong(f"a reset that was not made durable is in the log {len(said)} times")
            raise

    async def _load(self, stack: TierStack, one: Any, names: list[OffloadKey], forged: bool) -> int:
        self.engine.wipe()
        result = await stack.run(stack.job(support_stack.JobKind.LOAD, (one,), timeout_seconds=5.0))
        bad = self.engine.wrong(one, result.outcomes[0])
        if bad and not forged:
            self.tally.wrong_bytes += len(bad)
            self.wrong(f"loaded wrong bytes: {bad[:2]}")
        return sum(outcome.ok for outcome in result.outcomes[0])

    # -- rounds ------------------------------------------------------------------------------------------------------

    def round(self, rng: random.Random, count: int) -> None:
        """Roots with so many lies, each told once. Tools look at one of the roots."""
        self.template.restore()
        self.root = rng.choice(self.roots)
        told = list(forge_records(rng, self.template.records, self.template.files.__getitem__, count))
        forged = any(lie.forged and lie.record.kind in ("slot header", "block's header") for lie in told)
        kinds = Counter(lie.record.kind for lie in told)
        later = rng.choice((0, 0, rng.randrange(count + 1)))
        for lie in told[later:]:
            self._tell(rng, lie.record, lie.data)
        if self.layout == "slab" and rng.random() < 0.5:
            for root in self.roots:
                (root / "snapshot").unlink(missing_ok=True)
        self.context = f"{dict(kinds)}, {later} of them in use"
        for kind, number in kinds.items():
            self.tally.notes[f"in {self.layout} {kind}"] += number
        self.tally.iterations += count
        for arguments in rng.sample(TOOLS, 2):
            self.run_tool(arguments)
        if rng.random() < 0.5:
            self.run_tool(rng.choice(CHANGES))
        self.use(rng, OPERATIONS, forged, lambda: self._tell_later(rng, told[:later]))
        if rng.random() < 0.2:
            self.use(rng, 4, forged)
            self.run_tool(["fsck"])
        self.check_released()

    def _tell_later(self, rng: random.Random, told: list[ForgedRecord]) -> None:
        """Tell lies to a stack that is open, where what they are about is still there."""
        for lie in told:
            with suppress(FileNotFoundError):
                os.stat(self.folder / lie.record.file)
                self._tell(rng, lie.record, lie.data)

    def _tell(self, rng: random.Random, record: Record, data: bytes) -> None:
        """Write a lie, half the time into both copies of a record that has two."""
        path = self.folder / record.file
        if record.whole_file:
            path.write_bytes(data)
            return
        places = {record.at}
        if rng.random() < 0.5:
            twins = [one for one in self.template.records if (one.kind, one.file) == (record.kind, record.file)]
            places |= {one.at for one in twins} if record.kind in ("superblock", "epoch") else set()
        with path.open("r+b") as file:
            for at in places:
                file.seek(at)
                file.write(data[: record.length])
            if len(data) < record.length and rng.random() < 0.5:
                file.truncate(record.at + len(data))

    def check_released(self) -> None:
        """No descriptor is open on the root and no lock is held: this process can open it again."""
        self.doing = "closing"
        left = open_below(self.folder)
        if left:
            self.tally.leaks += len(left)
            self.wrong(f"left open: {left[:3]}")
        if self.watch.seen:
            self.wrong(f"errors that belong to no call: {self.watch.seen[:2]}")
            self.watch.seen.clear()

    def whole_again(self, rng: random.Random) -> int:
        """The root as it was, used after all that by this process: every block is there. Returns the memory it took."""
        self.template.restore()
        self.context = "undamaged"
        before = peak_reset()
        for arguments in (*TOOLS, *CHANGES):
            self.run_tool(arguments)
        self.use(rng, OPERATIONS, False)
        self.template.restore()
        if self.use(random.Random(self.layout), 0, False) or self._load_all() != len(self.keys):
            self.wrong("blocks of the undamaged root are missing")
        self.check_released()
        return peak() - before

    def _load_all(self) -> int:
        async def work() -> int:
            async with TierStack(self._parts()) as stack:
                groups = [support_stack.whole(self.keys[at : at + BLOCKS], 0, _GPU_BLOCKS) for at in (0, BLOCKS)]
                return sum([await self._load(stack, one, [], False) for one in groups])

        return asyncio.run(work())


async def _sweep(tier: LoadStore) -> None:
    """What a shared tier does once a minute."""
    if isinstance(tier, SharedFSBackend):
        await tier.sweep()


def lying_roots(budget: Budget, layouts: Sequence[str] = LAYOUTS, until_wrong: bool = False) -> Tally:
    """As many records in each layout. `until_wrong`: a layout ends with its first round that has a problem."""
    tally = Tally()
    for number, layout in enumerate(layouts):
        liar = Liar(tally, layout, budget.folder)
        count = (budget.count + number) // len(layouts)
        with contained(liar.watch):
            _rounds(liar, layout, budget.seed, count, until_wrong)
    return tally


def _rounds(liar: Liar, layout: str, seed: int, count: int, until_wrong: bool) -> None:
    tally, rng = liar.tally, random.Random(f"{layout}/{seed}")
    liar.whole_again(rng)
    usual, before_all = liar.whole_again(rng), held()
    done = number = 0
    while done < count and not (until_wrong and tally.problems):
        own = random.Random(f"{layout}/{seed}/{number}")
        told = min(own.choice(LIES_AT_ONCE), count - done)
        before = peak_reset()
        liar.round(own, told)
        more = peak() - before - usual
        note = "MiB above the undamaged root, at most"
        tally.notes[note] = max(tally.notes[note], more >> 20)
        if more > MEMORY_BYTES:
            tally.over_bound += 1
            liar.wrong(f"round {number} took {more >> 20} MiB more than the undamaged root")
        if number % CLI_EVERY == 0:
            liar.run_cli(own)
        if number % AGAIN_EVERY == 0:
            liar.whole_again(own)
        done, number = done + told, number + 1
    liar.whole_again(rng)
    tally.leaks += sum(max(0, now - was) for now, was in zip(held(), before_all, strict=True))
    tally.notes["roots with lies"] += number

"""Another process on the same root, for tests: `python support_files_peer.py WHAT ROOT [ARGUMENT]`; talks by lines."""

from __future__ import annotations

import asyncio
import fcntl
import os
import random
import signal
import struct
import subprocess
import sys
import traceback
from pathlib import Path

from support_files import FilesTier, open_files, options
from support_fs import keys

from faults.machine import warm
from kvtier.types.jobs import LOADED, MISSING, PRESENT, STORED, DropReason, dropped

CAPACITY = 6 << 20
SHARED_CAPACITY = 3 << 20
SHARED_DEPTH = 4
SHARED_POOL = 400
PROGRESS = struct.Struct("<QQQ")


def say(line: str) -> None:
    print(line, flush=True)


def hold(root: Path, lock: str) -> None:
    """Hold a lock file of the root until killed."""
    fd = os.open(root / lock, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(fd, fcntl.LOCK_EX)
    say("held")
    sys.stdin.read()


def say_at_first_io(tier: FilesTier) -> None:
    """Say `storing` once, when the tier submits I/O."""
    engine = tier.backend._root.engine
    submit = engine.submit

    def tell(requests):
        if engine.submit is tell:
            say("storing")
            engine.submit = submit
        submit(requests)

    engine.submit = tell


async def churn_forever(root: Path, argument: str) -> None:
    """Load and store random keys out of more than fit, until killed; `SEED PROGRESS` names a file to note progress in.

    Every loaded byte is compared. Noted are rounds, blocks loaded and blocks evicted.
    """
    seed, progress = argument.split(" ", 1)
    rng, rounds, loaded = random.Random(int(seed)), 0, 0
    note = os.open(progress, os.O_RDWR | os.O_CREAT, 0o600)
    async with open_files(options(root, capacity=SHARED_CAPACITY, io_depth=SHARED_DEPTH), rows=16) as tier:
        say_at_first_io(tier)
        while True:
            names = keys(rng.randint(1, 16), start=rng.randrange(SHARED_POOL))
            ended = await tier.load(names)
            assert set(ended) <= {LOADED, MISSING}, ended
            stored = await tier.store(names)
            assert set(stored) <= {STORED, PRESENT, dropped(DropReason.BACKLOG)}, stored
            rounds, loaded = rounds + 1, loaded + ended.count(LOADED)
            os.pwrite(note, PROGRESS.pack(rounds, loaded, tier.counters["evicted"]), 0)


def fork_workers(root: Path, _: str) -> None:
    """For each line fork a child that churns with it as its argument until it is killed, and wait for its end."""
    while line := sys.stdin.readline().strip():
        child = os.fork()
        if child == 0:
            try:
                asyncio.run(churn_forever(root, line))
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        say(str(child))
        _, status = os.waitpid(child, 0)
        say(f"ended {os.WTERMSIG(status) if os.WIFSIGNALED(status) else -1}")


class ForkServer:
    """Processes that churn on a root until they are killed, one after another, without starting Python anew."""

    def __init__(self, root: Path) -> None:
        command = [sys.executable, __file__, "fork", str(root)]
        self.child = 0
        self.process = warm.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def start(self, argument: object) -> int:
        """A new process that works on an argument. Returns its pid once it has submitted I/O."""
        self.process.stdin.write(f"{argument}\n")
        self.process.stdin.flush()
        told = {self.process.stdout.readline().strip() for _ in range(2)}
        assert "storing" in told, told
        self.child = int((told - {"storing"}).pop())
        return self.child

    def kill(self, pid: int) -> None:
        """SIGKILL; returns when the process is gone."""
        os.kill(pid, signal.SIGKILL)
        assert self.process.stdout.readline() == "ended 9\n"
        self.child = 0

    def alive(self) -> bool:
        """True while the process that was started last has not ended by itself."""
        try:
            os.kill(self.child, 0)
        except ProcessLookupError:
            return False
        return True

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *_: object) -> None:
        if self.child and self.alive():
            os.kill(self.child, signal.SIGKILL)
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.kill()
        self.process.wait()


async def serve(root: Path, _: str) -> None:
    """Do what the lines say: store A B, load A B, present A B, reset E. Answers with what came of it."""
    async with open_files(options(root, capacity=CAPACITY)) as tier:
        say("open")
        loop = asyncio.get_running_loop()
        while line := (await loop.run_in_executor(None, sys.stdin.readline)).split():
            if line[0] == "reset":
                await tier.backend.reset(int(line[1]))
                tier.epoch = int(line[1])
                say("done")
                continue
            names = keys(int(line[2]), start=int(line[1]))
            if line[0] == "present":
                say(str(await tier.present(names)))
            else:
                outcomes = await (tier.store(names) if line[0] == "store" else tier.load(names))
                say(" ".join(sorted({str(outcome.status) for outcome in outcomes})))


def main() -> None:
    what, root, argument = sys.argv[1], Path(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else ""
    if what in ("hold", "fork"):
        (hold if what == "hold" else fork_workers)(root, argument)
    else:
        asyncio.run(serve(root, argument))


if __name__ == "__main__":
    main()

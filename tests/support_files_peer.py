"""Another process on the same root, for tests: `python support_files_peer.py WHAT ROOT [ARGUMENT]`; talks by lines."""

from __future__ import annotations

import asyncio
import fcntl
import os
import sys
from pathlib import Path

from support_files import open_files, options
from support_fs import keys

CAPACITY = 6 << 20


def say(line: str) -> None:
    print(line, flush=True)


def hold(root: Path, lock: str) -> None:
    """Hold a lock file of the root until killed."""
    fd = os.open(root / lock, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(fd, fcntl.LOCK_EX)
    say("held")
    sys.stdin.read()


async def store_forever(root: Path, start: str) -> None:
    """Store blocks until killed, evicting on the way; say so when the first I/O was submitted."""
    settings = options(root, capacity=CAPACITY)
    async with open_files(settings, rows=32) as tier:
        first = int(start)
        submit = tier.backend._root.engine.submit

        def tell(requests):
            if tier.backend._root.engine.submit is tell:
                say("storing")
                tier.backend._root.engine.submit = submit
            submit(requests)

        tier.backend._root.engine.submit = tell
        while True:
            await tier.store(keys(32, start=first))
            first += 32


def fork_stores(root: Path, _: str) -> None:
    """For each line `START` fork a child that stores from there on until it is killed, and wait for its end."""
    while line := sys.stdin.readline().strip():
        child = os.fork()
        if child == 0:
            try:
                asyncio.run(store_forever(root, line))
            finally:
                os._exit(1)
        say(str(child))
        _, status = os.waitpid(child, 0)
        say(f"ended {os.WTERMSIG(status) if os.WIFSIGNALED(status) else -1}")


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
        (hold if what == "hold" else fork_stores)(root, argument)
    else:
        asyncio.run({"store": store_forever, "serve": serve}[what](root, argument))


if __name__ == "__main__":
    main()

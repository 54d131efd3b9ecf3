"""What a process has of the machine: open files, threads, mapped regions. It is counted before and after."""

from __future__ import annotations

import gc
import os
import re
import threading
import time
from collections import Counter
from pathlib import Path

_NUMBERS = re.compile(r"[0-9]+")
_LINGER_SECONDS = 3.0


def belongings() -> Counter[str]:
    """Open files by what they are, threads by name, mapped regions, each with its numbers left out. What only waits to
    be collected is collected first."""
    gc.collect()
    held: Counter[str] = Counter()
    for fd in os.listdir("/proc/self/fd"):
        try:
            held[f"file {_plain(os.readlink(f'/proc/self/fd/{fd}'))}"] += 1
        except FileNotFoundError:
            continue  # the listing's own
    held.update(f"thread {_plain(thread.name)}" for thread in threading.enumerate())
    maps = Path("/proc/self/maps").read_text()
    held["mapped regions"] = maps.count("/memfd:kvtier") + private_regions()
    return +held


def private_regions(pid: int | str = "self") -> int:
    """Mappings of a process that a fork finds empty and that ask for huge pages: regions of one process alone."""
    flags = (line.split() for line in Path(f"/proc/{pid}/smaps").read_text().splitlines() if line.startswith("VmFlags"))
    return sum("wf" in line and "hg" in line for line in flags)


def _plain(name: str) -> str:
    return _NUMBERS.sub("N", name)


def new_since(before: Counter[str]) -> list[str]:
    """What this process has now and did not have before."""
    return [f"{name} x{count}" for name, count in sorted((belongings() - before).items())]


def left_behind(before: Counter[str]) -> list[str]:
    """The same, after what is being closed in the background has had a moment to end."""
    until = time.monotonic() + _LINGER_SECONDS
    while (left := new_since(before)) and time.monotonic() < until:
        time.sleep(0.02)
    return left

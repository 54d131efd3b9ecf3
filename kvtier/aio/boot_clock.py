"""Clock of the machine since its start, for records that a later process reads."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class BootClock:
    """The clock of one start of the machine, whose id is `boot`; no correction of the time moves `now_ns`."""

    boot: bytes
    now_ns: Callable[[], int]


def read_boot_clock() -> BootClock:
    """The machine's own. Without a number for this start, no other process's clock counts as the same."""
    try:
        boot = uuid.UUID(Path("/proc/sys/kernel/random/boot_id").read_text().strip()).bytes
    except (OSError, ValueError):
        boot = uuid.uuid4().bytes
    return BootClock(boot, lambda: time.clock_gettime_ns(time.CLOCK_BOOTTIME))

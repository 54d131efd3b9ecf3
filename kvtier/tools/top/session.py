"""`kvtier top` on a terminal: readings in a thread, keys and redrawing in an event loop."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live

from kvtier.aio.daemon_pool import DaemonPool
from kvtier.errors import KVTierError, UsageError
from kvtier.tools.top.readings import StackReading
from kvtier.tools.top.sources import Source
from kvtier.tools.top.view import View

_KEYS_AT_ONCE = 64


async def watch(source: Source, first: StackReading, interval_seconds: float) -> None:
    """Show a source until the key `q`. `first` was read before. Raises UsageError without a terminal."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError("there is no terminal to draw on: use --once")
    view, console, changed = View(source.name), Console(), asyncio.Event()
    view.take(first)
    loop, keyboard = asyncio.get_running_loop(), sys.stdin.fileno()

    def pressed() -> None:
        for key in os.read(keyboard, _KEYS_AT_ONCE).decode(errors="ignore"):
            view.press(key)
        changed.set()

    with _keys(keyboard), Live(console=console, screen=True, auto_refresh=False) as live:
        loop.add_reader(keyboard, pressed)
        loop.add_signal_handler(signal.SIGWINCH, changed.set)
        reading = loop.create_task(_read_on(source, view, interval_seconds, changed))
        try:
            while not view.quitting:
                live.update(view.render(console.width), refresh=True)
                await changed.wait()
                changed.clear()
        finally:
            reading.cancel()
            loop.remove_reader(keyboard)
            loop.remove_signal_handler(signal.SIGWINCH)


async def _read_on(source: Source, view: View, interval_seconds: float, changed: asyncio.Event) -> None:
    """Read again and again. A source that has gone is tried until it is back."""
    pool = DaemonPool("kvtier-top", 1)
    try:
        while True:
            await asyncio.sleep(interval_seconds)
            try:
                view.take(await pool.run(source.read))
            except KVTierError as error:
                view.lose(str(error))
            changed.set()
    finally:
        pool.shutdown()


@contextmanager
def _keys(terminal: int) -> Iterator[None]:
    """Each key comes at once, and is not shown."""
    before = termios.tcgetattr(terminal)
    tty.setcbreak(terminal)
    try:
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)

"""The state of `kvtier top`: what was read, what is shown, and what a key does. It knows no terminal and no clock."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from kvtier.tools.top.readings import StackReading
from kvtier.tools.top.rows import TopFigures, restarted, snapshot
from kvtier.tools.top.screen import SORTS, screen

KEYS = "q quit  s sort  f freeze  r reset"


class View:
    """Takes readings and keys, and renders what to show."""

    def __init__(self, name: str) -> None:
        self.quitting = False
        self.frozen = False
        self.sort = next(iter(SORTS))
        self._name = name
        self._lost: str | None = None
        self._now: StackReading | None = None
        self._before: StackReading | None = None
        self._base: StackReading | None = None
        self._shown: TopFigures | None = None

    def take(self, reading: StackReading) -> None:
        """A reading came. After a restart of the source its counters begin anew."""
        if self._now is not None and restarted(self._now, reading):
            self._now = self._base = None
        before = self._now if self._lost is None else None
        self._lost, self._before, self._now = None, before, reading
        if not self.frozen:
            self._shown = snapshot(reading, self._before, self._base)

    def lose(self, reason: str) -> None:
        """There was nothing to read. What was read last stays on the screen; no rate spans the gap."""
        self._lost = reason

    def press(self, key: str) -> None:
        """A key was pressed. Others than those of `KEYS` do nothing."""
        match key:
            case "q":
                self.quitting = True
            case "s":
                sorts = list(SORTS)
                self.sort = sorts[(sorts.index(self.sort) + 1) % len(sorts)]
            case "f" | " ":
                self.frozen = not self.frozen
                self._show()
            case "r":
                self._base = self._now
                self._show()
            case _:
                pass

    def _show(self) -> None:
        if self._now is not None and not self.frozen:
            self._shown = snapshot(self._now, self._before, self._base)

    def render(self, width: int) -> RenderableType:
        """The whole screen."""
        state = [f"by {self.sort}"]
        if self.frozen:
            state.append("FROZEN")
        if self._base is not None:
            state.append("since reset")
        head = Text(f"kvtier top  {self._name}", style="bold", no_wrap=True, overflow="ellipsis")
        lost = [Text(f"LOST, trying again: {self._lost}", style="bold red")] if self._lost else []
        tables = [screen(self._shown, width, self.sort)] if self._shown is not None else []
        return Group(head, *lost, *tables, Text(f"{KEYS}  |  {', '.join(state)}", style="dim", no_wrap=True))

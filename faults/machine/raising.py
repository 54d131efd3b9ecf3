"""Exceptions raised where no code raises them: at a line of a tier."""

from __future__ import annotations

import dis
import linecache
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from types import CodeType, FrameType
from typing import Any

ASKS = ("CALL", "BUILD", "BINARY", "STORE_SUBSCR", "GET_", "FOR_ITER", "MAKE_", "IMPORT", "FORMAT", "LIST_", "DICT_",
        "SET_", "MAP_", "SEND", "COMPARE", "CONTAINS", "UNPACK")  # fmt: skip
"""Beginnings of the names of instructions that may ask for memory, or call what does."""
RELEASES = ("os.close(", "close(", "close_quietly(", "share_with_children(", "calls.queue_exit(")
"""Beginnings of lines that only give something back to the system, which takes no memory."""

Place = tuple[str, str, int]
"""A file, a function and a line of it."""


@cache
def lines_that_ask(code: CodeType) -> frozenset[int]:
    """Where the lines of a function begin that may ask for memory.

    The way out of a `with` is left out: it takes no memory, and the interpreter lets no signal in before it.
    """
    found: set[int] = set()
    begin, asks = 0, True
    instructions, starts = list(dis.get_instructions(code)), dict(dis.findlinestarts(code))
    for number, one in enumerate(instructions):
        if (line := starts.get(one.offset)) is not None:
            ahead = instructions[number + (one.opname == "SWAP") :][:4]
            way_out = [each.argval for each in ahead[:3] if each.opname == "LOAD_CONST"] == [None] * 3
            releases = linecache.getline(code.co_filename, line).lstrip().startswith(RELEASES)
            begin, asks = one.offset, releases or (way_out and ahead[3].opname in ("PRECALL", "CALL"))
        if not asks and one.opname.startswith(ASKS):
            asks = True
            found.add(begin)
    return frozenset(found)


class LineTrace(ABC):
    """Sees the lines of some folders that may ask for memory, in any thread that starts while it is installed."""

    def __init__(self, folders: Sequence[str]) -> None:
        self._folders = tuple(folders)
        self.armed = False

    @contextmanager
    def installed(self) -> Iterator[None]:
        threading.settrace(self._on_call)
        sys.settrace(self._on_call)
        try:
            yield
        finally:
            sys.settrace(None)
            threading.settrace(None)  # type: ignore[arg-type]

    def _sees(self, code: CodeType) -> bool:
        """True for a function whose lines are to be seen."""
        return code.co_filename.startswith(self._folders)

    @abstractmethod
    def _at(self, frame: FrameType) -> None:
        """A line that may ask for memory is about to run, while this is armed."""

    def _on_call(self, frame: FrameType, event: str, _: Any) -> Any:
        return self._on_line if self._sees(frame.f_code) else None

    def _on_line(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "line" and self.armed and frame.f_lasti in lines_that_ask(frame.f_code):
            self._at(frame)
        return self._on_line


class PlaceFault(LineTrace):
    """Records the places of lines while it is armed, and raises MemoryError at visit `visit` of one of them, once."""

    def __init__(self, folders: Sequence[str]) -> None:
        super().__init__(folders)
        self.at: Place | None = None
        self.visit = 1
        self.raised = False
        self.places: dict[Place, int] = {}

    @contextmanager
    def armed_now(self) -> Iterator[None]:
        self.armed = True
        try:
            yield
        finally:
            self.armed = False

    def _at(self, frame: FrameType) -> None:
        place = (frame.f_code.co_filename, frame.f_code.co_qualname, frame.f_lineno)
        self.places[place] = count = self.places.get(place, 0) + 1
        if place == self.at and count == self.visit and not self.raised:
            self.raised = True
            raise MemoryError

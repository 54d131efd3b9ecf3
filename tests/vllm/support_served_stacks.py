"""The stack process of a `FakeEngine`: a thread of the test, whose pool it may look into."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import pytest
from fake_engine import FakeEngine
from support_driver import ServedHere

from kvtier.client.private import Restarts
from kvtier.config import parse_stack, stack_parts
from kvtier.engines.vllm import settings
from kvtier.service.earlier_ranks import adopt_ranks
from kvtier.stack import StackStats
from kvtier.types.keys import OffloadKey

T = TypeVar("T")


class ServedStack:
    """A stack process that serves already, with the face of a `PrivateStack`."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.restarts = Restarts()

    def start(self, *, again: bool = False) -> None:
        """It serves."""


class ServedStacks:
    """The stacks that serve the engines of a test."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._served: dict[str, ServedHere] = {}
        self._started = 0

    def private(self, text: str, runtime_dir: str = "", **_: Any) -> ServedStack:
        """In the place of `PrivateStack`: the stack process for a stack file, in a thread."""
        return ServedStack(self._socket(text))

    def _socket(self, text: str) -> str:
        """Processes whose engines have gone end first, so that a new one begins."""
        for other, served in list(self._served.items()):
            if served.pool_opened and served.is_idle:
                self._served.pop(other).stop()
        served = self._served.get(text)
        if served is None:
            self._started += 1
            config = adopt_ranks(parse_stack(text), logging.getLogger(__name__).warning)
            path = os.path.join(self._folder, f"{self._started}.sock")
            served = self._served[text] = ServedHere(lambda namespace: stack_parts(config, namespace), path)
            served.start()
        return served.path

    def stop(self) -> None:
        for served in self._served.values():
            served.stop()

    def end_process(self, engine: FakeEngine) -> None:
        """End the stack process of an engine, which has not left it."""
        self._pool_of(engine).stop()

    def start_process(self, engine: FakeEngine) -> None:
        """Start the next one at its path."""
        before = self._pool_of(engine)
        for text, served in self._served.items():
            if served is before:
                self._served[text] = ServedHere(before.parts, before.path)
                self._served[text].start()

    def stack_of(self, engine: FakeEngine) -> Any:
        """The stack that serves an engine."""
        return self._pool_of(engine).pool

    def _pool_of(self, engine: FakeEngine) -> ServedHere:
        path = engine.manager._driver.identity.path
        return next(served for served in self._served.values() if served.path == path)

    def call(self, engine: FakeEngine, call: Callable[..., T], *args: Any) -> T:
        """Call something of the stack, in the thread that it belongs to."""
        return self._pool_of(engine).run(call, *args)

    def control(self, engine: FakeEngine) -> Any:
        """The state of the stack's control plane."""
        return self.stack_of(engine)._assembled.plane.control

    def calls(self, engine: FakeEngine, kind: str, count: int) -> Any:
        """The one policy model of the stack, once it was given so many calls of a kind."""
        models, until = self.control(engine).models, time.monotonic() + 60.0

        (model,) = models
        while self.call(engine, lambda: len(model.told(kind))) < count:
            assert time.monotonic() < until
            engine.step()
        return model

    def locate(self, engine: FakeEngine, keys: Sequence[OffloadKey]) -> list[str | None]:
        """The highest tier that has each key."""
        found: list[str | None] = self.call(engine, self.stack_of(engine).locate, keys)
        return found

    @staticmethod
    def eventually(engine: FakeEngine, true: Callable[[], object]) -> None:
        """Step until a condition holds: what an engine says reaches a stack process after its step."""
        until = time.monotonic() + 60.0
        while not true():
            assert time.monotonic() < until
            engine.step()

    @staticmethod
    def of_engine(request_id: str) -> str:
        """A request's id as its engine has it: a stack process puts the number of the engine before it."""
        return request_id.partition(":")[2]

    def is_at_rest(self, engine: FakeEngine) -> bool:
        """True if nothing is on its way to a tier."""
        stats = self.stats(engine)
        return not (stats.backlog or any(tier.slots["filling"] for tier in stats.tiers.values()))

    def stats(self, engine: FakeEngine) -> StackStats:
        """The figures of the stack."""
        stats: StackStats = self.call(engine, self.stack_of(engine).stats)
        return stats


def serve_here(folder: str, monkeypatch: pytest.MonkeyPatch) -> ServedStacks:
    """Have stack processes of engines made from here on be threads of this process."""
    stacks = ServedStacks(folder)
    monkeypatch.setattr(settings, "PrivateStack", stacks.private)
    return stacks

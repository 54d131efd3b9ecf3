"""Prompts through a stack of a CPU tier and one with `admit: predicted`, in a time of their own."""

from __future__ import annotations

from dataclasses import replace

from support_control import World, cpu_setup, fs_setup, key, shared_setup

from kvtier.types.keys import RequestId
from kvtier.types.requests import NO_INFO

SHORT, LONG = 1, 6
"""Blocks of prompts that come back after 40 s, and of those that never do."""


class Traffic:
    """Prompts through a stack: each short one is asked again, no long one is."""

    def __init__(self, kind: str = "owned", rows: int = 64, **more: object) -> None:
        below = fs_setup(256) if kind == "owned" else shared_setup()
        self.world = World(cpu_setup(rows), [replace(below, admit="predicted", **more)])
        self.number = 0
        self.requests = 0

    def ask(self, numbers: list[int]) -> None:
        world, name = self.world, RequestId(str(self.requests))
        self.requests += 1
        assert world.plane.uses is not None
        world.plane.uses.begin(name, [key(n) for n in numbers], world.now, None, NO_INFO)
        world.store(*numbers)
        world.run_all()
        world.plane.uses.end(name, None)

    def new(self, size: int) -> list[int]:
        self.number += size
        return list(range(self.number - size, self.number))

    def learn(self, rounds: int = 300) -> None:
        waiting: list[list[int]] = []
        for _ in range(rounds):
            short, long = self.new(SHORT), self.new(LONG)
            self.ask(short)
            self.ask(long)
            waiting.append(short)
            if len(waiting) > 4:
                self.ask(waiting.pop(0))
            self.world.now += 10.0

    def written(self, numbers: list[int]) -> list[bool]:
        lower = self.world.plane.control.lowers[0]
        return [bool(lower.index.presence(key(n), self.world.now)) for n in numbers]

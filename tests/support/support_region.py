"""Regions of a few pages for tests, and peers: real processes that open one and do as they are told."""

from __future__ import annotations

import json
import mmap
import subprocess
import sys
from pathlib import Path
from typing import Any

from faults.machine import warm
from kvtier.types.geometry import Geometry, GroupLayout, KVLayout, TensorRef
from kvtier_cpu import RegionSpec, Sharing

PEER = Path(__file__).with_name("support_region_peer.py")


def geometry(world_size: int = 2, factor: int = 2, *, replicated: bool = False) -> Geometry:
    """Two groups of different page sizes, one with two tensors; rows of whole pages."""
    groups = (GroupLayout((TensorRef(0, 1000), TensorRef(1, 504))), GroupLayout((TensorRef(2, 700),)))
    return Geometry(KVLayout(groups, world_size, factor, replicated), mmap.PAGESIZE)


def named(directory: Path | str, engine_id: str, participants: int, participant: int = 0, **more: Any) -> RegionSpec:
    """A region met by name in `directory`; participants 0..world_size-1 serve the worker of the same number."""
    layout = more.pop("geometry", None) or geometry()
    return RegionSpec(
        geometry=layout,
        num_rows=more.pop("num_rows", 16),
        namespace_digest=more.pop("namespace_digest", b"n" * 16),
        serves=(participant,) if participant < layout.world_size else (),
        sharing=Sharing.NAMED,
        engine_id=engine_id,
        participants=participants,
        participant=participant,
        directory=str(directory),
        deadline_seconds=more.pop("deadline_seconds", 20.0),
        **more,
    )


class Peer:
    """A process that opens regions on request. `ask` sends one request, `answer` waits for its reply."""

    def __init__(self) -> None:
        self.process = warm.Popen([sys.executable, str(PEER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def ask(self, do: str, **request: Any) -> Peer:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **request}).encode() + b"\n")
        self.process.stdin.flush()
        return self

    def answer(self) -> dict[str, Any] | None:
        """The reply, or None if the process died instead of giving one."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        return json.loads(line) if line else None

    def call(self, do: str, **request: Any) -> dict[str, Any] | None:
        return self.ask(do, **request).answer()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()

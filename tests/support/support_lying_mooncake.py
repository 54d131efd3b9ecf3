"""A client library of Mooncake that answers as servers that lie would have it: a package in a folder.

The real library runs in processes of its own, which take it from `PYTHONPATH`; so they take this one.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

_LIBRARY = """
import ctypes, os, secrets, time
LIE = os.environ["KVTIER_TEST_LIE"]
SLOW_SECONDS = 0.3

class ReplicateConfig:
    pass

class MooncakeDistributedStore:
    def setup(self, config):
        return 0

    def register_buffer(self, base, size):
        return 0

    def batch_get_into(self, names, pointers, sizes):
        if LIE == "codes":
            return ["many"] * len(names)
        if LIE == "number":
            return 5
        if LIE == "more":
            return [-704] * (len(names) + 1)
        if LIE == "nested":
            return [[-704]] * len(names)
        if LIE == "huge":
            return [1 << 70] * len(names)
        if LIE == "slow":
            time.sleep(SLOW_SECONDS)
        if LIE == "none":
            open(names[0], "w").close()
            time.sleep(3600)
        for name, pointer in zip(names, pointers):
            text = f"{'ab' * 8} 1 {self.next_of(name)}"
            if LIE == "incarnation":
                text = f"ab 1 {self.next_of(name)}"
            ctypes.memmove(pointer, text.ljust(64).encode(), 64)
        return list(sizes)

    def next_of(self, name):
        if LIE in ("circle", "incarnation"):
            return {"a" * 16: "b" * 16}.get(name.rpartition(".")[2], "a" * 16)
        return secrets.token_hex(8)

    def batch_get_replica_desc(self, names):
        return {}

    def batch_is_exist(self, names):
        return [0] * len(names)

    def batch_put_from(self, names, pointers, sizes, config):
        return [0] * len(names)

    batch_upsert_from = batch_put_from
"""
NO_ANSWER = "none"
"""A call of this library opens the file that is named, and never returns."""
LIES = ("circle", "endless", "slow", "codes", "number", "more", "nested", "huge", "incarnation")


def install(folder: Path, lie: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the processes of this test's tiers use it, with this lie."""
    package = folder / "lying" / "mooncake"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "store.py").write_text(_LIBRARY)
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    monkeypatch.setenv("KVTIER_TEST_LIE", lie)
    for name in [name for name in sys.modules if name.partition(".")[0] == "mooncake"]:
        monkeypatch.delitem(sys.modules, name)

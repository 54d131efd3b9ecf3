"""vLLM's side of `benchmarks.lookup`: `python -m benchmarks.lookup_vllm`, under a Python that has vLLM."""

from __future__ import annotations

import itertools
import logging
import os
import random
import tempfile
import time
from typing import Any

from benchmarks.peer import prefix_of, rate, serve
from benchmarks.vllm_fs import fs_tier


class Managers:
    """vLLM's CPU manager with `resident` keys, and its fs tier over as many files."""

    def __init__(self) -> None:
        self._turn = itertools.count()
        self._folder = tempfile.TemporaryDirectory(prefix="kvtier-benchmark-")

    def open(self, resident: int, folder: str | None, fs: bool) -> dict[str, Any]:
        """Make everything `resident`. The files of the fs tier are empty: it only looks whether they are there."""
        import vllm
        from vllm.v1.kv_offload.base import ReqContext, make_offload_key
        from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

        logging.disable(logging.INFO)
        self._context = ReqContext
        self._make_key = make_offload_key
        self._random = random.Random(2)
        self._keys = self._fresh(resident)
        self._looked, self._cycled = CPUOffloadingManager(resident), CPUOffloadingManager(resident)
        for manager in (self._looked, self._cycled):
            for first in range(0, resident, 512):
                self._store(manager, self._keys[first : first + 512])
        if fs:
            self._open_fs(folder)
        return {"version": vllm.__version__}

    def _fresh(self, count: int) -> list[bytes]:
        return [self._make_key(self._random.randbytes(32), 0) for _ in range(count)]

    def _open_fs(self, folder: str | None) -> None:
        if folder is not None:
            self._folder.cleanup()
            self._folder = tempfile.TemporaryDirectory(prefix="kvtier-benchmark-", dir=folder)
        self._tier = fs_tier(memoryview(bytearray(8192)).cast("B", (2, 4096)), self._folder.name)
        for key in self._keys:
            path = self._tier.file_mapper.get_file_name(key)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))

    def _store(self, manager: Any, keys: list[bytes]) -> int:
        """One request from its lookup to its end; returns how many keys it stored."""
        context = self._context(req_id=str(next(self._turn)))
        manager.on_new_request(context)
        misses = [key for key in keys if manager.lookup(key, context).name == "MISS"]
        prepared = manager.prepare_store(misses, context)
        manager.complete_store(prepared.keys_to_store, context)
        manager.on_request_finished(context)
        return len(prepared.keys_to_store)

    def _load(self, manager: Any, keys: list[bytes]) -> int:
        context = self._context(req_id=str(next(self._turn)))
        manager.on_new_request(context)
        hits = [key for key in keys if manager.lookup(key, context).name == "HIT"]
        manager.prepare_load(hits, context)
        manager.complete_load(hits, context)
        manager.on_request_finished(context)
        return len(hits)

    def _look(self, keys: list[bytes]) -> int:
        context = self._context(req_id=str(next(self._turn)))
        return sum(self._looked.lookup(key, context).name == "HIT" for key in keys)

    def _look_fs(self, keys: list[bytes]) -> int:
        """From the first question to the last answer: asked in one step, answered by its thread, taken in the next."""
        from vllm.v1.kv_offload.tiering.base import ScheduleEndContext

        context = self._context(req_id=str(next(self._turn)))
        for key in keys:
            self._tier.lookup(key, context)
        self._tier.on_schedule_end(ScheduleEndContext((), ()))
        while self._tier._lookup_manager._pending_results.empty():
            time.sleep(0)
        hits = sum(self._tier.lookup(key, context).name == "HIT" for key in keys)
        self._tier.on_request_finished(context)
        return hits

    def measure(self, what: str, batch: int, seconds: float) -> dict[str, Any]:
        """Keys a second. Every key that is asked for must be a hit, every key that is stored new."""
        works = {
            "lookup": self._look,
            "fs_lookup": self._look_fs,
            "load_cycle": lambda keys: self._load(self._looked, keys),
            "store_cycle": lambda keys: self._store(self._cycled, keys),
        }

        def work(keys: list[bytes]) -> int:
            done = works[what](keys)
            if done != len(keys):
                raise AssertionError(f"{what}: {done} of {len(keys)} keys")
            return done

        turn = itertools.count()
        storing = what == "store_cycle"
        found = rate(lambda: self._fresh(batch) if storing else prefix_of(self._keys, batch, next(turn)), work, seconds)
        return {"rate": found}

    def close(self) -> dict[str, Any]:
        """Remove the files."""
        self._folder.cleanup()
        return {}


if __name__ == "__main__":
    managers = Managers()
    serve({"open": managers.open, "measure": managers.measure, "close": managers.close})
    managers.close()

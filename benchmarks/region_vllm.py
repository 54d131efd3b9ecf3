"""vLLM's side of `benchmarks.region`: `python -m benchmarks.region_vllm`, under a Python that has vLLM."""

from __future__ import annotations

import logging
import os
import resource
import time
from typing import Any

import numpy as np

from benchmarks.peer import serve


class Regions:
    """vLLM's `SharedOffloadRegion`, as the scheduler's process or as a worker's makes it."""

    def __init__(self) -> None:
        self._made = 0

    def open(self) -> dict[str, Any]:
        """Import what it takes."""
        import vllm
        from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion

        logging.disable(logging.INFO)
        self._region = SharedOffloadRegion
        return {"version": vllm.__version__}

    def make(self, num_bytes: int, row_bytes: int, whole: bool) -> dict[str, Any]:
        """Seconds until a region is mapped and resident. `whole`: populated by one call, else row by row (a worker)."""
        self._made += 1
        rank = None if whole else 0
        name = f"kvtier-benchmark-{os.getpid()}-{self._made}"
        started, faults = time.perf_counter(), _faults()
        region = self._region(name, num_bytes // row_bytes, rank, row_bytes, row_bytes, barrier=_no_other_process)
        seconds = time.perf_counter() - started
        made = _faults() - faults
        view = np.asarray(region.create_kv_memoryview()).view(np.uint8)
        faults = _faults()
        view[:, :: os.sysconf("SC_PAGE_SIZE")] = 1
        answer = {"seconds": seconds, "faults": made, "later_faults": _faults() - faults, "bytes": view.size}
        del view
        region.cleanup()
        return answer


def _faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def _no_other_process() -> None:
    """One process: there is none to wait for."""


if __name__ == "__main__":
    regions = Regions()
    serve({"open": regions.open, "make": regions.make})

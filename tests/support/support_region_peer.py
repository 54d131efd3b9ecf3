"""A peer process of the region tests: one JSON request a line on stdin, one JSON reply a line on stdout."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Any

import numpy as np
from support_region import named

from kvtier.errors import KVTierError
from kvtier.types.arrays import distinct
from kvtier_cpu import RegionHost, SharedRegion, open_region


def open_as_told(request: dict[str, Any]) -> tuple[SharedRegion | None, dict[str, Any]]:
    """Open the region at the given instant, dying at a step if told so; tell when each step was reached."""
    steps: dict[str, float] = {}

    def observe(step: str) -> None:
        steps[str(step)] = time.monotonic()
        if step == request.get("die_at"):
            os.kill(os.getpid(), signal.SIGKILL)
        if step == request.get("stop_at"):
            os.kill(os.getpid(), signal.SIGSTOP)

    while time.monotonic() < request.get("at", 0.0):
        pass
    try:
        region = open_region(named(**request["spec"]), RegionHost(observe=observe))
    except KVTierError as error:
        return None, {"error": type(error).__name__, "text": str(error), "steps": steps}
    return region, {
        "incarnation": region.incarnation,
        "steps": steps,
        "ready": region.ready,
        "complete": region.complete,
    }


def serve() -> None:
    region: SharedRegion | None = None
    for line in sys.stdin:
        request = json.loads(line)
        reply: dict[str, Any] = {}
        match request["do"]:
            case "open":
                region, reply = open_as_told(request)
            case "close" if region is not None:
                region.close()
                region = None
            case "write" if region is not None:
                region.view[request["row"]] = request["value"]
            case "read" if region is not None:
                reply = {"values": distinct(region.view[request["row"]]).tolist()}
            case "stamp" if region is not None:
                rows = np.array(request["rows"], dtype=np.int64)
                region.stamp(request["worker"], rows, np.array(request["generations"], dtype=np.int64))
                region.end_use(request["worker"], rows)
        sys.stdout.write(json.dumps(reply) + "\n")
        sys.stdout.flush()
    if region is not None:
        region.close()


if __name__ == "__main__":
    serve()

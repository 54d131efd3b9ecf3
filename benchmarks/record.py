"""What the recorder costs: `python -m benchmarks.record`.

CPU time of `record` in the thread that calls it, and of the recorder's own thread, by request.
A tenth of each prompt's blocks is new; the rest was asked for before.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import click

from benchmarks.options import JSON_FILE
from kvtier.options import RecordOptions
from kvtier.traces.write import Recorder

BATCH = 100


def measure(blocks: int, requests: int) -> dict[str, Any]:
    """The least of all batches for the caller, the sum of all for the recorder."""
    with tempfile.TemporaryDirectory(prefix="kvtier-benchmark-") as folder:
        recorder = Recorder(RecordOptions(folder=folder), 16, hold_seconds=0.0)
        recorder.open()
        keys = [os.urandom(32) for _ in range(blocks)]
        process, calls, caller = time.process_time(), time.thread_time(), float("inf")
        for batch in range(requests // BATCH):
            keys = keys[: -(blocks // 10)] + [os.urandom(32) for _ in range(blocks // 10)]
            begun = time.thread_time()
            for _ in range(BATCH):
                recorder.record(keys[:], blocks * 16, 1, time.monotonic())
            caller = min(caller, time.thread_time() - begun)
            recorder.wake()
            while recorder.recorded < (batch + 1) * BATCH and not recorder.dropped:
                time.sleep(0.01)
        asyncio.run(recorder.close())
        writer = (time.process_time() - process) - (time.thread_time() - calls)
        assert recorder.recorded == requests
    return {
        "blocks": blocks,
        "caller_us": round(caller / BATCH * 1e6, 2),
        "recorder_us": round(writer / requests * 1e6, 1),
    }


@click.command(help=__doc__)
@click.option("--requests", default=2000)
@JSON_FILE
def main(requests: int, json_file: Path | None) -> None:
    found = [measure(blocks, requests) for blocks in (10, 100, 1000)]
    text = json.dumps(found, indent=2)
    click.echo(text)
    if json_file is not None:
        json_file.write_text(text + "\n")


if __name__ == "__main__":
    main()

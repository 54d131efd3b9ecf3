"""A worker process of the tests: a real GPU tier on the shared region, served to the coordinator over a socket.

Arguments: socket fd, region file's fd, worker index, rows, name of the layout in `LAYOUTS`.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys

import numpy as np
from support_gpu import MmapRows, context, make_worker

from kvtier.stack.workers.remote_worker import serve_worker
from kvtier.types.geometry import Geometry, GroupKind, GroupLayout, KVLayout, TensorRef
from kvtier_gpu import GPUBackend, GPUOptions

NUM_BLOCKS = 24
TWO_WORKERS = Geometry(
    KVLayout(
        (
            GroupLayout((TensorRef(0, 1000), TensorRef(1, 333))),
            GroupLayout((TensorRef(2, 4096),), kind=GroupKind.SLIDING_WINDOW, window_tokens=64),
        ),
        world_size=2,
        block_size_factor=4,
    ),
    alignment=4096,
)


async def serve(sock: socket.socket, file: int, index: int, num_rows: int) -> None:
    rows = MmapRows(TWO_WORKERS, num_rows, file)
    worker = make_worker(TWO_WORKERS, NUM_BLOCKS, "strided", np.random.default_rng(index))
    tier, mine = GPUBackend(GPUOptions()), context(TWO_WORKERS, worker.tensors, rows, index)
    opened = await tier.open(mine)
    await serve_worker(sock, tier, mine, opened)
    await tier.close()
    rows.close()


if __name__ == "__main__":
    sock_fd, file_fd, worker_index, row_count = (int(word) for word in sys.argv[1:])
    asyncio.run(serve(socket.socket(fileno=sock_fd), file_fd, worker_index, row_count))
    os.close(file_fd)

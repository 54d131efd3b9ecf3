"""What no engine at a service can be faster than, in a process of its own: a greeting with memory that is mapped and
touched, and an echo over sockets of the same kind.
"""

from __future__ import annotations

import os
import secrets
import select
import socket
import threading
import time
from typing import Any

import numpy as np

from benchmarks.peer import serve
from kvtier.client.connection import Identity, Participant, connect
from kvtier.types.geometry import KVLayout
from kvtier.types.namespace import Namespace
from kvtier_cpu.region.huge_pages import map_aligned

MESSAGE_BYTES_MAX = 1 << 16


class Bare:
    """The works that the benchmark asks this process for."""

    def ready(self) -> dict[str, Any]:
        """Nothing: all is loaded."""
        return {}

    def touch(self, path: str, page_bytes: int, touched_bytes: int) -> dict[str, Any]:
        """Milliseconds for the greeting of a worker, and to map all rows and read so many bytes of them, in equal
        distances; 0 for all bytes."""
        identity = Identity(path, Namespace(KVLayout.of_pages(page_bytes)), "bare", secrets.token_hex(16))
        begun = time.perf_counter()
        sock, welcome, descriptors = connect(identity, Participant("worker"))
        greeted = time.perf_counter()
        rows = np.frombuffer(map_aligned(descriptors[0], welcome.num_rows * welcome.row_bytes), dtype=np.uint8)
        rows = rows.reshape(welcome.num_rows, welcome.row_bytes)
        count = touched_bytes // welcome.row_bytes
        some = rows[:: max(1, len(rows) // count)][:count] if count else rows
        total = int(some[:, :: os.sysconf("SC_PAGE_SIZE")].sum())
        ended = time.perf_counter()
        sock.close()
        return {"hello_ms": (greeted - begun) * 1e3, "ms": (ended - begun) * 1e3, "sum": total}

    def echo(self, path: str, answer_bytes: int) -> dict[str, Any]:
        """Answer each message at a socket with so many bytes, until this process ends."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(path)
        listener.listen()
        threading.Thread(target=_answer_all, args=(listener, bytes(answer_bytes)), daemon=True).start()
        return {}


def _answer_all(listener: socket.socket, answer: bytes) -> None:
    poll, socks = select.epoll(), {listener.fileno(): listener}
    poll.register(listener, select.EPOLLIN)
    while True:
        for fd, _ in poll.poll():
            if fd == listener.fileno():
                sock, _ = listener.accept()
                socks[sock.fileno()] = sock
                poll.register(sock, select.EPOLLIN)
            elif socks[fd].recv(MESSAGE_BYTES_MAX):
                socks[fd].send(answer)
            else:
                poll.unregister(fd)
                socks.pop(fd).close()


if __name__ == "__main__":
    bare = Bare()
    serve({name: getattr(bare, name) for name in ("ready", "touch", "echo")})

"""The process that has a client of Mooncake: a script that answers requests, one after another.

The library cannot be trusted with a process that serves: it holds the interpreter's lock while it connects, its calls
wait for a frozen server without a bound and write into their buffers later, and a call after `close` ends the process.
So it gets a process that may be killed at any moment, and memory that is shared with nothing but its own requests.

Nothing of kvtier is imported here. Requests and answers are lines of JSON: `[call, names, offsets, sizes]`, and one
number for each name, the library's own; negative ones are its error codes.
"""

import ctypes
import json
import mmap
import os
import signal
import socket
import sys
from typing import Any

Numbers = list[int]
_PR_SET_PDEATHSIG = 1
INVALID, TRANSFER_FAILED, MISSING, CHANGED = -600, -800, -704, -706


class Calls:
    """The library's calls, over memory that is registered with it."""

    def __init__(self, config: dict[str, Any], memory: mmap.mmap) -> None:
        from mooncake.store import MooncakeDistributedStore, ReplicateConfig

        self._base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._store: Any = MooncakeDistributedStore()
        self._blocks, self._pinned = ReplicateConfig(), ReplicateConfig()
        self._blocks.replica_num = self._pinned.replica_num = config.pop("replicas")
        self._pinned.with_hard_pin = True
        code = self._store.setup(config) or self._store.register_buffer(self._base, len(memory))
        if code:
            raise OSError(code, "the library refuses")

    def _pointers(self, offsets: Numbers) -> Numbers:
        return [self._base + offset for offset in offsets]

    def put(self, names: list[str], offsets: Numbers, sizes: Numbers) -> Numbers:
        codes: Numbers = self._store.batch_upsert_from(names, self._pointers(offsets), sizes, self._blocks)
        return codes

    def get(self, names: list[str], offsets: Numbers, sizes: Numbers) -> Numbers:
        """The bytes of each value. The library reads none that has more than `sizes`; its length is said then."""
        found: Numbers = self._store.batch_get_into(names, self._pointers(offsets), sizes)
        for i, code in enumerate(found):
            if code == INVALID:
                length = self._store.get_size(names[i])
                found[i] = TRANSFER_FAILED if length == sizes[i] else length
        return found

    def fronts(self, names: list[str], offsets: Numbers, sizes: Numbers) -> Numbers:
        """The first bytes of each value, as many as `sizes` gives. None may have fewer."""
        places = [names], [[[offset] for offset in offsets]], [[[0]] * len(names)], [[[size] for size in sizes]]
        (found,) = self._store.get_into_ranges([self._base], *places)
        return [code for (code,) in found]

    def present(self, names: list[str], offsets: Numbers, sizes: Numbers) -> Numbers:
        """The length of each value. Of one without replicas it is not said why: the master may be gone."""
        replicas = self._store.batch_get_replica_desc(names)
        absent = [name for name in names if name not in replicas]
        known = dict(zip(absent, self._store.batch_is_exist(absent), strict=True)) if absent else {}
        return [min(known.get(name, 0), 0) or self._length(replicas.get(name, ())) for name in names]

    def _length(self, replicas: Any) -> int:
        for replica in replicas:
            if replica.is_memory_replica():
                return int(replica.get_memory_descriptor().buffer_descriptor.size)
        return MISSING

    def remove(self, names: list[str], offsets: Numbers, sizes: Numbers) -> Numbers:
        codes: Numbers = self._store.batch_remove(names, True)
        return codes

    def create(self, names: list[str], offsets: Numbers, sizes: Numbers) -> Numbers:
        """Keep a value that is never evicted, unless there is one of its name."""
        codes: Numbers = self._store.batch_put_from(names, self._pointers(offsets), sizes, self._pinned)
        return codes

    def replace(self, names: list[str], offsets: Numbers, sizes: Numbers) -> Numbers:
        """Keep the bytes at the first offset, as a value that is never evicted, in place of those at the second one;
        `CHANGED` where other bytes are there by now."""
        (size,), (target, source) = sizes, self._pointers(offsets)
        expected = ctypes.string_at(source, size)
        (length,) = self._store.batch_get_into(names, [source], [size])
        if length != size or ctypes.string_at(source, size) != expected:
            return [CHANGED]
        codes: Numbers = self._store.batch_upsert_from(names, [target], [size], self._pinned)
        return codes


def end_with(parent: int) -> None:
    """Have the kernel kill this process when the thread that started it ends, however that comes about: with a call in
    flight that a server does not answer, this one does not see that its channel is closed."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


def main() -> None:
    end_with(int(sys.argv[3]))
    channel = socket.socket(fileno=int(sys.argv[1])).makefile("rw")
    memory = mmap.mmap(int(sys.argv[2]), 0)
    config = json.loads(channel.readline())
    signal.setitimer(signal.ITIMER_REAL, config.pop("seconds"))  # ends the process: setup holds the interpreter's lock
    try:
        calls: Calls | None = Calls(config, memory)
        answer = "ready"
    except Exception as error:
        calls, answer = None, f"{type(error).__name__}: {error}"
    signal.setitimer(signal.ITIMER_REAL, 0)
    print(json.dumps(answer), file=channel, flush=True)
    for line in channel if calls else ():
        name, *arguments = json.loads(line)
        print(json.dumps(getattr(calls, name)(*arguments)), file=channel, flush=True)
    os._exit(0)  # the library's own end may wait for a server


if __name__ == "__main__":
    main()

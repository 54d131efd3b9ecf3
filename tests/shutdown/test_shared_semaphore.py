"""A semaphore in shared memory: one waits, in whatever process, until another posts."""

from __future__ import annotations

import mmap
import signal
import sys
import threading

import numpy as np
import pytest

from faults.machine import warm
from kvtier.aio.shared_semaphore import SEMAPHORE_BYTES, SharedSemaphore

ANSWERS = """
import mmap, sys
import numpy as np
from kvtier.aio.shared_semaphore import SharedSemaphore
with open(sys.argv[1], "r+b") as file:
    memory = np.frombuffer(mmap.mmap(file.fileno(), mmap.PAGESIZE), np.uint8)
asked, answered = SharedSemaphore(memory[:32], new=True), SharedSemaphore(memory[64:96])
answered.post()
for number in range(100):
    asked.wait()
    memory[128] = number
    answered.post()
"""


def test_questions_to_another_process_are_answered_one_by_one(tmp_path):
    place = tmp_path / "page"
    place.write_bytes(bytes(mmap.PAGESIZE))
    with place.open("r+b") as file:
        memory = np.frombuffer(mmap.mmap(file.fileno(), mmap.PAGESIZE), np.uint8)
    asked, answered = SharedSemaphore(memory[:SEMAPHORE_BYTES]), SharedSemaphore(memory[64:96], new=True)
    with warm.Popen([sys.executable, "-c", ANSWERS, str(place)]) as other:
        answered.wait()
        for number in range(100):
            asked.post()
            answered.wait()
            assert memory[128] == number
        assert other.wait(60) == 0


def test_what_was_posted_before_is_not_lost():
    semaphore = SharedSemaphore(np.zeros(SEMAPHORE_BYTES, np.uint8), new=True)
    for _ in range(3):
        semaphore.post()
    for _ in range(3):
        semaphore.wait()


def test_a_signal_does_not_end_the_waiting():
    semaphore = SharedSemaphore(np.zeros(4, np.uint64).view(np.uint8), new=True)
    seen: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: seen.append(number))
    waiting = threading.Thread(target=semaphore.wait)
    try:
        waiting.start()
        assert waiting.ident is not None
        for _ in range(3):
            signal.pthread_kill(waiting.ident, signal.SIGUSR1)
        assert waiting.is_alive()
        semaphore.post()
        waiting.join(10.0)
        assert not waiting.is_alive()
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_memory_that_is_no_semaphore_is_refused():
    for memory in (np.zeros(24, np.uint8), np.zeros(40, np.uint8)[1:33]):
        with pytest.raises(ValueError, match="aligned"):
            SharedSemaphore(memory)

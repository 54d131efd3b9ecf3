"""A second thread that takes in what a journal holds, on and on, as that of a stack does between an engine's steps."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvtier.policy import Journal


@contextmanager
def second_thread() -> Iterator[Callable[[Journal], None]]:
    """What is given hands it a journal; the first one counts. It ends with the block."""
    journals, done = list[Journal](), threading.Event()

    def take_in_on_and_on() -> None:
        while not done.is_set():
            for journal in journals:
                with journal.lock:
                    journal.take_in_some()

    def share(journal: Journal) -> None:
        if not journals:
            journal.lock = threading.Lock()
            journals.append(journal)

    thread = threading.Thread(target=take_in_on_and_on)
    thread.start()
    try:
        yield share
    finally:
        done.set()
        thread.join()

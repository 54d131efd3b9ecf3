"""What a stack says in the log, on any machine, and what vLLM shows of it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


def complaints(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """What was captured but the notes of tiers that opened: those tell what the machine lacks, such as io_uring."""
    return [record for record in caplog.records if not record.getMessage().startswith("tier ")]


@contextmanager
def said_by_vllm(caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    """What the logger says that vLLM shows, from INFO on."""
    vllm, said = logging.getLogger("vllm"), list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    vllm.addHandler(handler)
    try:
        with caplog.at_level(logging.INFO, vllm.name):
            yield said
    finally:
        vllm.removeHandler(handler)

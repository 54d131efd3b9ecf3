"""What a stack says in the log, on any machine."""

from __future__ import annotations

import logging

import pytest


def complaints(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """What was captured but the notes of tiers that opened: those tell what the machine lacks, such as io_uring."""
    return [record for record in caplog.records if not record.getMessage().startswith("tier ")]

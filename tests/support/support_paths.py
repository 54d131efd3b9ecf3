"""Where the project, its test support and the request traces lie."""

from __future__ import annotations

from pathlib import Path

SUPPORT = Path(__file__).resolve().parent
PROJECT = SUPPORT.parents[1]
TRACES = PROJECT.parent / "shared" / "traces"

"""Protections of the adapter for vLLM and how to turn each of them off in tests."""

from __future__ import annotations

import pytest


def without_the_question_for_continuation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hits are offered whatever the attention does with a prefix."""
    from kvtier.engines.vllm import engine_config

    monkeypatch.setattr(engine_config, "continues_after_prefix", lambda config: True)

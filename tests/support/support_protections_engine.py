"""Protections of the adapter for vLLM and how to turn each of them off in tests."""

from __future__ import annotations

import pytest


def without_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each engine of a launch has the whole bounds of the stack file, in folders of its own."""
    from kvtier_fs.options import FSOptions

    def whole(self: FSOptions, index: int, count: int) -> FSOptions:
        return self.model_copy(update={"roots": [f"{root}-{index}" for root in self.roots]}) if count > 1 else self

    monkeypatch.setattr(FSOptions, "share", whole)


def without_the_question_for_continuation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hits are offered whatever the attention does with a prefix."""
    from kvtier.engines.vllm import secondary, settings

    for module in (settings, secondary):
        monkeypatch.setattr(module, "continues_after_prefix", lambda config: True)

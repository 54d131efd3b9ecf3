"""Protections of the identity of a model, and how to turn each of them off: see `support_protections`."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvtier.engines import digests
from kvtier.engines.digests import Confirmation, ContentDigests, FileState
from kvtier.engines.vllm import engine_settings, identity, weight_files
from kvtier.engines.vllm.model_code import ModelCode


def without_second_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are those of the folder that the engine was started with."""
    for module in (weight_files, engine_settings):
        monkeypatch.setattr(module, "secondary_sources", lambda built: [])


def without_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever computes is vLLM's."""
    monkeypatch.setattr(ModelCode, "fields", lambda self: {})


def without_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processors, scales and variables are as they are."""
    monkeypatch.setattr(identity, "settings_files", lambda config, built: [])
    monkeypatch.setattr(identity, "settings_of", lambda config: {})


def without_the_last_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of one size and one time of writing has one content."""
    seen = FileState.of.__func__  # type: ignore[attr-defined]
    monkeypatch.setattr(FileState, "of", classmethod(lambda cls, path: seen(cls, path)._replace(changed=0)))


def without_samples_of_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where only the last change of a file differs, its content is taken as known. That the whole is read guards the
    same mistake, if later, so it does not count either."""
    monkeypatch.setattr(digests, "tensor_samples", lambda path: "0" * 64)
    without_reading_the_whole(monkeypatch)


def without_reading_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """What samples say is so."""
    monkeypatch.setattr(Confirmation, "begin", lambda self, sampled: None)


def without_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies on the disk is what was loaded."""
    monkeypatch.setattr(ContentDigests, "changed_since", lambda self, files, moment: [])


IDENTITY_SWITCHES: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str]] = {
    "second places": (without_second_places, "second place"),
    "code": (without_code, "code"),
    "settings": (without_settings, "processor"),
    "the last change": (without_the_last_change, "one tensor"),
    "samples of tensors": (without_samples_of_tensors, "one tensor"),
    "reading the whole": (without_reading_the_whole, "one byte"),
    "the start": (without_the_start, "while it starts"),
}
"""Name of a protection: how to turn it off, and the change of a model that goes unnoticed then."""

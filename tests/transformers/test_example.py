"""The example and the code in the documentation do what they say."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from support_counts import fully
from support_paths import PROJECT
from support_transformers import needs_transformers

from kvtier.engines.transformers import PrefixCache

pytestmark = needs_transformers

ROOT = PROJECT
SMALL = ["--turns", "3", "--message", "40", "--answer", "5", "--layers", "2", "--device", "cpu"]


def chat() -> ModuleType:
    spec = importlib.util.spec_from_file_location("example_chat", ROOT / "examples" / "chat.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look it up
    spec.loader.exec_module(module)
    return module


def test_the_example_shows_a_table_and_finds_the_logits_identical(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert chat().main([*SMALL, "--disk", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    rows = re.findall(r"│ +(\d) │ +(\d+) │ +(\d+) │ +[\d.]+ │ +[\d.]+ │ +[\d.]+ │ identical │", shown)
    # Whole blocks of all but the last token of the turn before: 44 and 89 tokens.
    assert rows == [("1", "40", "0"), ("2", "85", "32"), ("3", "130", "80")], shown
    assert "bit for bit" in " ".join(shown.split())
    assert not list(tmp_path.iterdir())


@fully
def test_the_example_fails_when_a_bit_of_what_comes_back_is_wrong(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    restore = PrefixCache.restore

    def spoilt(self: PrefixCache, token_ids: Sequence[int], salt: bytes = b"") -> tuple[Any, int]:
        cache, count = restore(self, token_ids, salt)
        if count:
            bits = cache.layers[1].values[0, 1, 20].view(torch.int32)
            bits[3] ^= 1 << 16
        return cache, count

    monkeypatch.setattr(PrefixCache, "restore", spoilt)
    assert chat().main(["--turns", "2", *SMALL[2:], "--disk", str(tmp_path)]) == 1


def test_the_example_fails_when_less_comes_back_than_was_saved(capsys: pytest.CaptureFixture[str]) -> None:
    example = chat()
    whole, less = (example.Turn(40, restored, 0.1, torch.zeros(2, 3)) for restored in (32, 16))
    assert example.report([whole], [whole], [whole], [whole])
    assert not example.report([whole], [whole], [whole], [less])
    assert not example.report([whole], [whole], [less], [whole])


@fully
def test_the_code_in_the_documentation_runs(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "transformers.md").read_text()
    blocks = re.findall(r"^```py\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert blocks
    for block in blocks:
        command = [sys.executable, "-W", "error", "-c", block]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, block + done.stdout + done.stderr


def test_the_documentation_names_the_demonstration_and_its_file_exists() -> None:
    text = (ROOT / "docs" / "transformers.md").read_text()
    (command,) = re.findall(r"^```bash\n(.*?)\n```$", text, re.MULTILINE | re.DOTALL)
    assert command.endswith("'.[transformers]' && .venv/bin/python examples/chat.py")
    assert (ROOT / "examples" / "chat.py").exists()

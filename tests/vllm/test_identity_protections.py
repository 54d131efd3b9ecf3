"""Models that are changed between two lives of an engine, in every place that decides K and V: blocks of before are
never served after. Each protection that sees to it is turned off once, and they are.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support_protections_identity import IDENTITY_SWITCHES
from torch import nn

from kvtier.engines import digests
from kvtier.engines.digests import Confirmation, FilesChanged
from kvtier.engines.vllm.engine_settings import settings_of
from kvtier.engines.vllm.identity import beside_weights, refine
from kvtier.engines.vllm.weight_files import weight_files
from kvtier.types.geometry import GroupLayout, KVLayout, TensorRef
from kvtier.types.namespace import Namespace

pytestmark = pytest.mark.engine

NAMESPACE = Namespace(KVLayout((GroupLayout((TensorRef(0, 4096),), 16),)))
LIVES = 10
TENSORS, TENSOR_BYTES = 8, 64 << 10


class Model:
    """A model of every part that may change, and the disk that its engines share: what computed the blocks that are
    stored under the digest of a namespace."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.second, self.package = folder / "model", folder / "second", folder / "site" / "own_rope"
        self.parts: dict[str, int] = dict.fromkeys(("tensor", "byte", "second", "code", "processor"), 0)
        self.disk: dict[bytes, str] = {}
        self.write()

    def write(self) -> None:
        """Every file, in place, as `parts` say."""
        for folder in (self.folder, self.second, self.package):
            folder.mkdir(parents=True, exist_ok=True)
        write_weights(self.folder / "model.safetensors", self.parts["tensor"], self.parts["byte"])
        write_weights(self.second / "model.safetensors", 100 + self.parts["second"], 0)
        (self.folder / "preprocessor_config.json").write_text(json.dumps({"mean": self.parts["processor"]}))
        text = f"from torch import nn\n\nFACTOR = {self.parts['code']}\n\n\nclass Rope(nn.Module):\n    pass\n"
        (self.package / "__init__.py").write_text(text)

    def change(self, *parts: str, keep_time: bool = False) -> None:
        """Another content of these parts, perhaps under the time that the file of weights had."""
        found = (self.folder / "model.safetensors").stat()
        for part in parts:
            self.parts[part] += 1
        self.write()
        if keep_time:
            os.utime(self.folder / "model.safetensors", ns=(found.st_atime_ns, found.st_mtime_ns))

    def built(self) -> Any:
        for name in [name for name in sys.modules if name == "own_rope"]:
            del sys.modules[name]
        importlib.invalidate_caches()
        model = nn.Sequential(importlib.import_module("own_rope").Rope())
        more = {"model_or_path": str(self.second), "revision": None, "subfolder": None, "prefix": "text."}
        model.secondary_weights = [SimpleNamespace(**more, allow_patterns_overrides=None)]
        return model

    def live(self, change: Callable[[], None] | None = None) -> bool:
        """An engine's life: it loads what is there, perhaps sees a change while it starts, serves what it finds under
        its name, and stores. True if something that another model computed was served, or is left to be."""
        started, loaded, model = time.time_ns(), json.dumps(self.parts), self.built()
        if change is None:
            started += 3600 * 10**9
        else:
            change()
        confirmation = Confirmation()
        try:
            name = namespace_digest(configuration(self.folder), model, started, confirmation)
        except FilesChanged:
            return False
        confirmation.wait()
        if confirmation.refutation():  # what was stored in this name is reset
            self.disk.pop(name, None)
            confirmation.accept()
            return False
        confirmation.close()
        return self.disk.setdefault(name, loaded) != loaded


def write_weights(path: Path, tensor: int, byte: int) -> None:
    """Some tensors; another `tensor`, another content of one of them; another `byte`, one that no sample reads."""
    spans = {f"{number}": number * TENSOR_BYTES for number in range(TENSORS)}
    header = json.dumps(
        {name: {"dtype": "U8", "shape": [], "data_offsets": [at, at + TENSOR_BYTES]} for name, at in spans.items()}
    ).encode()
    seeds = [number + 1000 * tensor * (number == tensor % TENSORS) for number in range(TENSORS)]
    body = bytearray(b"".join(random.Random(seed).randbytes(TENSOR_BYTES) for seed in seeds))
    body[-1500] ^= byte % 256
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(body))


def configuration(folder: Path) -> Any:
    unset = ("revision", "code_revision", "tokenizer", "tokenizer_revision", "quantization", "quantization_config")
    model = SimpleNamespace(
        model=str(folder), model_weights="", hf_config=SimpleNamespace(), hf_overrides={}, trust_remote_code=False
    )
    for name in unset:
        setattr(model, name, None)
    model.multimodal_config = SimpleNamespace()
    load = SimpleNamespace(load_format="auto", download_dir=None)
    return SimpleNamespace(model_config=model, load_config=load, speculative_config=None, lora_config=None)


def namespace_digest(config: Any, model: Any, started: int, confirmation: Confirmation) -> bytes:
    """The name that an engine's blocks get, as its one worker and its scheduler find it. The fixture's files of code
    and of processors are written during the test: what is young there is not the question here."""
    files = weight_files(config, [model])
    fields = settings_of(config) | beside_weights(config, [model], files)
    fields.pop("unsure", None)
    note = {"architectures": "Own", "computed": "c", "started": started, "files": files.to_json()} | fields
    return asyncio.run(refine(NAMESPACE, [json.dumps(note)], confirmation)).digest()


CHANGES: dict[str, Callable[[Model], bool]] = {
    "second place": lambda model: [model.change("second"), model.live()][-1],
    "code": lambda model: [model.change("code"), model.live()][-1],
    "processor": lambda model: [model.change("processor"), model.live()][-1],
    "one tensor": lambda model: [model.change("tensor", keep_time=True), model.live()][-1],
    "one byte": lambda model: [model.change("byte", keep_time=True), model.live()][-1],
    "while it starts": lambda model: [model.live(lambda: model.change("tensor")), model.live()][-1],
}


@pytest.fixture
def model(tmp_path, monkeypatch) -> Model:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(digests, "YOUNG_SECONDS", -60.0)
    monkeypatch.setattr(importlib.metadata, "packages_distributions", dict)  # takes half a second
    made = Model(tmp_path)
    assert not made.live()
    return made


@pytest.mark.parametrize("change", CHANGES)
def test_blocks_of_another_model_are_never_served(model, change):
    assert [CHANGES[change](model) for _ in range(LIVES)] == [False] * LIVES


def test_blocks_of_the_same_model_are_served_in_every_life(model):
    for _ in range(LIVES):
        os.chmod(model.folder / "model.safetensors", random.choice((0o600, 0o640, 0o644)))
        assert not model.live()
    assert len(model.disk) == 1


@pytest.mark.parametrize("protection", IDENTITY_SWITCHES)
def test_without_a_protection_they_are(model, monkeypatch, protection):
    switch, change = IDENTITY_SWITCHES[protection]
    switch(monkeypatch)
    assert any(CHANGES[change](model) for _ in range(LIVES))

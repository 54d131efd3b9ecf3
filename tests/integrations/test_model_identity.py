"""The digest of a model's folder, for engines that show their storage no weights."""

import hashlib
import json
from pathlib import Path

import pytest

from kvtier.engines.engine_memory.options import IdentifiedOptions, read_options
from kvtier.errors import ConfigError


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> None:
    """A cache of digests for this test alone."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path) -> Path:
    """A plain model."""
    path = tmp_path / "model"
    path.mkdir()
    for name in ("model.safetensors", "config.json"):
        (path / name).write_text(name)
    return path


def digest(folder: Path) -> str:
    keys = {"model_folder": str(folder), "roots": ["/nowhere"], "capacity": "1MiB"}
    return read_options(IdentifiedOptions, "fs", keys, "at").weights_digest("at")


def test_a_plain_model_has_the_digest_that_releases_before_gave_it(folder):
    each = [[name, hashlib.sha256(name.encode()).hexdigest()] for name in ("config.json", "model.safetensors")]
    assert digest(folder) == hashlib.sha256(json.dumps(each).encode()).hexdigest()


@pytest.mark.parametrize(
    "name",
    [
        "model.safetensors",
        "preprocessor_config.json",
        "modeling_own.py",
        "am.mvn",
        "audio_tokenizer/model.safetensors",
        "adapters/retrieval/adapter_model.safetensors",
        "whisper-large-v3/preprocessor_config.json",
    ],
)
def test_everything_that_decides_k_and_v_counts(folder, name):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("before")
    before = digest(folder)
    path.write_text("after.")
    assert digest(folder) != before


@pytest.mark.parametrize("name", ["README.md", "chat_template.jinja", "checkpoint-100/model.safetensors"])
def test_the_rest_does_not(folder, name):
    before, path = digest(folder), folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("new")
    assert digest(folder) == before


def test_a_folder_of_code_alone_has_no_weights(folder):
    (folder / "model.safetensors").rename(folder / "model.py")
    with pytest.raises(ConfigError, match="has no files of weights"):
        digest(folder)

"""Which files identify a model's weights, and what the workers' notes make of the namespace. No engine runs here."""

import dataclasses
import json
import os
import random
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier.errors import ConfigError
from kvtier.integrations.digests import FilesChanged
from kvtier.integrations.vllm import weight_files as found_files
from kvtier.integrations.vllm.identity import refine
from kvtier.integrations.vllm.weight_files import changed_since_start, weight_files
from kvtier.types.geometry import GroupLayout, KVLayout, TensorRef
from kvtier.types.namespace import Namespace

pytestmark = pytest.mark.engine

NAMESPACE = Namespace(KVLayout((GroupLayout((TensorRef(0, 4096),), 16),)), model="/models/here")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> None:
    """A cache of digests for this test alone."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def config(
    *models: str, load_format: str = "auto", download_dir: Path | None = None, revision: str | None = None
) -> Any:
    """What of vLLM's configuration says where the weights are: of the model, and of its draft."""
    each: list[Any] = [SimpleNamespace(model=model, revision=revision, model_weights="") for model in models]
    return SimpleNamespace(
        model_config=each[0],
        speculative_config=SimpleNamespace(draft_model_config=each[1]) if each[1:] else None,
        load_config=SimpleNamespace(
            load_format=load_format, download_dir=None if download_dir is None else str(download_dir)
        ),
    )


def model(folder: Path, seed: int = 0, name: str = "model.safetensors") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(random.Random(seed).randbytes(1000))
    (folder / "config.json").write_text("{}")
    return folder


def note(files: Any, **more: Any) -> str:
    known = {"architectures": "LlamaForCausalLM", "computed": "c", "files": files and files.to_json(), "changed": False}
    return json.dumps(known | more)


async def identity(*folders: Path, **more: Any) -> Namespace:
    return await refine(NAMESPACE, [note(weight_files(config(*map(str, folders))), **more)])


async def test_copies_of_a_model_are_one_whatever_their_folders_and_times(tmp_path):
    one = model(tmp_path / "one")
    shutil.copytree(one, tmp_path / "other", copy_function=shutil.copyfile)
    os.utime(tmp_path / "other" / "model.safetensors", (1, 1))
    assert (await identity(one)).digest() == (await identity(tmp_path / "other")).digest()
    assert (await identity(one)).digest() != (await identity(model(tmp_path / "third", seed=1))).digest()


async def test_a_draft_counts(tmp_path):
    one, draft, other = (model(tmp_path / name, seed) for seed, name in enumerate(["one", "draft", "other"]))
    found = [await identity(one), await identity(one, draft), await identity(one, other)]
    assert len({each.digest() for each in found}) == 3


async def test_what_each_rank_computes_with_counts(tmp_path):
    files = weight_files(config(str(model(tmp_path / "one"))))
    ranks = [note(files, computed="a"), note(files, computed="b")]
    assert (await refine(NAMESPACE, ranks)).digest() != (await refine(NAMESPACE, ranks[::-1])).digest()


@pytest.mark.parametrize("field", ["attention", "revision", "model_config", "cache_dtype", "quantization", "pages"])
async def test_every_field_of_a_note_counts_and_has_to_be_equal_on_all_ranks(tmp_path, field):
    folder = model(tmp_path / "one")
    one, other = await identity(folder, **{field: "a"}), await identity(folder, **{field: "b"})
    assert one.digest() != other.digest()
    files = weight_files(config(str(folder)))
    with pytest.raises(ConfigError, match="disagree about the model"):
        await refine(NAMESPACE, [note(files, **{field: "a"}), note(files, **{field: "b"})])


def test_a_file_of_weights_may_be_named_itself(tmp_path):
    path = model(tmp_path / "one", name="model.gguf") / "model.gguf"
    files = weight_files(config(str(path)))
    assert files is not None
    assert files.places == (str(path),)


def test_a_model_of_the_hub_is_found_in_its_cache(tmp_path):
    commit = "0123456789abcdef0123456789abcdef01234567"
    cached = tmp_path / "hub" / "models--someone--small"
    model(cached / "snapshots" / commit)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(commit)
    files = weight_files(config("someone/small", download_dir=tmp_path / "hub"))
    assert files is not None
    assert files.places == (str(cached / "snapshots" / commit),)
    assert not changed_since_start(files)
    assert weight_files(config("someone/other", download_dir=tmp_path / "hub")) is None
    assert weight_files(config("someone/small", download_dir=tmp_path / "hub", revision="v2")) is None


@pytest.mark.parametrize("load_format", ["dummy", "tensorizer", "runai_streamer", "a plugin's"])
def test_weights_that_do_not_come_from_these_files_have_none(tmp_path, load_format):
    assert weight_files(config(str(model(tmp_path / "one")), load_format=load_format)) is None


def test_weights_in_an_object_store_have_no_files(tmp_path):
    given = config(str(model(tmp_path / "one")))
    given.model_config.model_weights = "s3://bucket/model"
    assert weight_files(given) is None


async def test_without_files_the_operator_names_the_weights():
    with pytest.raises(ConfigError, match="name them yourself"):
        await refine(NAMESPACE, [note(None)])
    tagged = dataclasses.replace(NAMESPACE, tag="revision 7")
    assert (await refine(tagged, [note(None)])).weights == ""


async def test_files_replaced_between_loading_and_reading_are_no_identity(tmp_path):
    folder = model(tmp_path / "one")
    files = weight_files(config(str(folder)))
    model(folder, seed=1)
    with pytest.raises(FilesChanged, match="while the engine started"):
        await refine(NAMESPACE, [note(files)])


async def test_files_changed_after_this_process_had_started_are_no_identity(tmp_path, monkeypatch):
    files = weight_files(config(str(model(tmp_path / "one"))))
    assert files is not None
    assert changed_since_start(files)
    monkeypatch.setattr(
        found_files, "_started_at", lambda: Path(files.places[0], "model.safetensors").stat().st_ctime_ns
    )
    assert not changed_since_start(files)
    with pytest.raises(FilesChanged, match="restart it"):
        await refine(NAMESPACE, [note(files, changed=True)])

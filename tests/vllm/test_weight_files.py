"""Which files identify a model's weights, and what the workers' notes make of the namespace. No engine runs here."""

import asyncio
import dataclasses
import hashlib
import json
import os
import random
import shutil
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier.engines import digests
from kvtier.engines.digests import Confirmation, FilesChanged
from kvtier.engines.vllm import weight_files as found_files
from kvtier.engines.vllm.identity import refine
from kvtier.engines.vllm.weight_files import moved_references, weight_files
from kvtier.errors import ConfigError
from kvtier.types.geometry import GroupLayout, KVLayout, TensorRef
from kvtier.types.namespace import Namespace

pytestmark = pytest.mark.engine

LATER = 3600 * 1_000_000_000
"""Engines of these tests start so many nanoseconds after the files were made, unless a test says otherwise."""
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
    known = {"architectures": "LlamaForCausalLM", "computed": "c", "files": files and files.to_json()}
    return json.dumps(known | {"started": time.time_ns() + LATER} | more)


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
    assert [source.paths for source in files.main] == [[path]]


def test_a_model_of_the_hub_is_found_in_its_cache(tmp_path, monkeypatch):
    commit = "0123456789abcdef0123456789abcdef01234567"
    cached = tmp_path / "hub" / "models--someone--small"
    model(cached / "snapshots" / commit)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(commit)
    files = weight_files(config("someone/small", download_dir=tmp_path / "hub"))
    assert files is not None
    assert [source.place for source in files.main] == [str(cached / "snapshots" / commit)]
    assert weight_files(config("someone/other", download_dir=tmp_path / "hub")) is None
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "1")  # it loads from the cache of another hub then
    assert weight_files(config("someone/small", download_dir=tmp_path / "hub")) is None
    monkeypatch.delenv("VLLM_USE_MODELSCOPE")
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
    files, started = weight_files(config(str(folder))), time.time_ns()
    model(folder, seed=1)
    with pytest.raises(FilesChanged, match="restart it"):
        await refine(NAMESPACE, [note(files, started=started)])


@pytest.mark.parametrize("how", ["link", "link of a file", "renamed"])
async def test_weights_in_whose_place_others_were_put_while_the_engine_started_are_no_identity(tmp_path, how):
    """The files of the new ones are older than the process."""
    older, newer, place = model(tmp_path / "older"), model(tmp_path / "newer", seed=1), tmp_path / "place"
    await asyncio.sleep(0.05)
    if how == "link":
        place.symlink_to(older)
    elif how == "link of a file":
        model(place, name="other.safetensors")
        (place / "model.safetensors").symlink_to(older / "model.safetensors")
    else:
        older.rename(place)
    await asyncio.sleep(0.05)
    started = time.time_ns()
    files = weight_files(config(str(place)))
    assert (await refine(NAMESPACE, [note(files, started=started)])).weights
    await asyncio.sleep(0.05)
    if how == "link":
        place.unlink()
        place.symlink_to(newer)
    elif how == "link of a file":
        (place / "model.safetensors").unlink()
        (place / "model.safetensors").symlink_to(newer / "model.safetensors")
    else:
        place.rename(tmp_path / "away")
        newer.rename(place)
    with pytest.raises(FilesChanged, match="was put there after this process had started"):
        await refine(NAMESPACE, [note(weight_files(config(str(place))), started=started)])


async def test_a_folder_of_snapshots_that_is_no_cache_of_the_hub_is_checked(tmp_path):
    folder = model(tmp_path / "snapshots" / "run7")
    started = time.time_ns() - LATER
    with pytest.raises(FilesChanged, match="was changed after"):
        await refine(NAMESPACE, [note(weight_files(config(str(folder))), started=started)])


@pytest.mark.parametrize("change", ["another", "longer", "fewer"])
async def test_a_list_of_files_that_changes_meanwhile_is_no_identity(tmp_path, change):
    folder = model(model(tmp_path / "one"), name="b.safetensors")
    files = weight_files(config(str(folder)))
    {
        "another": lambda: model(folder, name="c.safetensors"),
        "longer": lambda: (folder / "b.safetensors").write_bytes(b"x" * 2000),
        "fewer": (folder / "b.safetensors").unlink,
    }[change]()
    with pytest.raises(FilesChanged, match="came, went or grew"):
        await refine(NAMESPACE, [note(files)])


async def test_ranks_that_saw_other_files_are_no_identity_and_no_error_of_the_configuration(tmp_path):
    one, other = (weight_files(config(str(model(tmp_path / name)))) for name in ("one", "other"))
    with pytest.raises(FilesChanged, match="restart it"):
        await refine(NAMESPACE, [note(one), note(other)])


# -- weights from a second place ---------------------------------------------------------------------------------


def built(*sources: Any) -> list[Any]:
    """A model as vLLM builds it, with what it loads beside its own folder."""
    return [SimpleNamespace(secondary_weights=list(sources))]


def source(place: Path | str, **more: Any) -> Any:
    given = {"revision": None, "subfolder": None, "prefix": "", "allow_patterns_overrides": None}
    return SimpleNamespace(model_or_path=str(place), **given | more)


async def second(folder: Path, *sources: Any, started: int = 0) -> Namespace:
    files = weight_files(config(str(folder)), built(*sources))
    return await refine(NAMESPACE, [note(files, started=started or time.time_ns() + LATER)])


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
async def test_weights_in_a_second_place_count_wherever_that_is(tmp_path, name):
    one, text = model(tmp_path / "one"), model(tmp_path / "text", seed=1)
    before = await second(one, source(text, prefix="language_model."))
    shutil.copytree(text, tmp_path / "elsewhere")
    assert before.digest() == (await second(one, source(tmp_path / "elsewhere", prefix="language_model."))).digest()
    (text / name).write_bytes(b"trained again")
    assert before.digest() != (await second(one, source(text, prefix="language_model."))).digest()


async def test_the_place_in_the_model_that_weights_are_for_counts(tmp_path):
    one, text, audio = (model(tmp_path / name, seed) for seed, name in enumerate(["one", "text", "audio"]))
    both = await second(one, source(text, prefix="language_model."), source(audio, prefix="audio_tower."))
    swapped = await second(one, source(audio, prefix="language_model."), source(text, prefix="audio_tower."))
    assert both.digest() != swapped.digest()


async def test_weights_in_a_subfolder_count(tmp_path):
    one = model(tmp_path / "one")
    model(one / "whisper")
    before = await second(one, source(one, subfolder="whisper"))
    model(one / "whisper", seed=3)
    assert before.digest() != (await second(one, source(one, subfolder="whisper"))).digest()


@pytest.mark.parametrize("folder", ["audio_tokenizer", "adapters/retrieval"])
async def test_weights_that_a_class_of_vllm_reads_by_itself_count(tmp_path, folder):
    one = model(tmp_path / "one")
    plain = await second(one)
    model(one / folder)
    before = await second(one)
    model(one / folder, seed=3)
    assert len({each.digest() for each in (plain, before, await second(one))}) == 3


async def test_heads_beside_the_weights_change_nothing_for_they_were_counted_before(tmp_path):
    one = model(model(tmp_path / "one"), name="sparse_linear.pt")
    heads = source(one, prefix="sparse_linear.", allow_patterns_overrides=["sparse_linear.pt"])
    assert (await second(one, heads)).digest() == (await second(one)).digest()


def test_a_second_place_that_is_not_on_this_host_names_no_weights(tmp_path):
    assert weight_files(config(str(model(tmp_path / "one"))), built(source("someone/gone"))) is None


async def test_a_second_place_written_after_the_process_began_is_no_identity(tmp_path):
    one, text = model(tmp_path / "one"), model(tmp_path / "text", seed=1)
    with pytest.raises(FilesChanged, match="restart it"):
        await second(one, source(text), started=time.time_ns() - LATER)


async def test_a_plain_model_is_named_as_releases_before_named_it(tmp_path):
    known = await second(model(tmp_path / "one"))
    assert set(known.extra) == {"computed"}
    each = sorted(
        [["model.safetensors", hashlib.sha256((tmp_path / "one/model.safetensors").read_bytes()).hexdigest()]]
    )
    assert known.weights == hashlib.sha256(json.dumps(each).encode()).hexdigest()


# -- the hub's cache ---------------------------------------------------------------------------------------------

OLD, NEW = "0" * 40, "1" * 40


@pytest.fixture
def hub(tmp_path) -> Path:
    """A cache with two snapshots of one repository, of which the branch names the new one."""
    repository = tmp_path / "hub" / "models--someone--small"
    for seed, commit in enumerate((OLD, NEW)):
        model(repository / "snapshots" / commit, seed)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(NEW)
    return repository


def moved(hub: Path, commit: str | None = None) -> list[str]:
    given = SimpleNamespace(model_config=SimpleNamespace(hf_config=SimpleNamespace(_commit_hash=commit)))
    return moved_references(given, [str(hub / "snapshots" / NEW)])


def test_a_branch_that_moved_while_the_engine_started_leaves_open_what_was_loaded(hub):
    assert moved(hub) == moved(hub, OLD) == [str(hub / "snapshots" / NEW)]
    assert moved(hub, NEW) == []


def test_a_branch_that_moved_before_the_engine_started_does_not(hub, monkeypatch):
    monkeypatch.setattr(found_files, "started_at", lambda: time.time_ns() + LATER)
    assert moved(hub) == []


def test_a_branch_that_moved_to_the_same_files_does_not(hub):
    for path in (hub / "snapshots" / OLD).iterdir():
        path.unlink()
        path.symlink_to(hub / "snapshots" / NEW / path.name)
    assert moved(hub) == []


async def test_a_file_that_may_have_changed_is_no_identity(tmp_path):
    files = weight_files(config(str(model(tmp_path / "one"))))
    with pytest.raises(FilesChanged, match=r"plug-in\.py may have changed"):
        await refine(NAMESPACE, [note(files, unsure=["/some/plug-in.py"])])


# -- owner, mode and links that change after the process began ---------------------------------------------------


def tensors(folder: Path, *changed: int, seed: int = 1) -> Path:
    """A file of 40 tensors of 64 KiB; those of the numbers given are another's."""
    folder.mkdir(parents=True, exist_ok=True)
    size = 64 << 10
    names = {f"layer {number}": number * size for number in range(40)}
    header = json.dumps(
        {name: {"dtype": "U8", "shape": [size], "data_offsets": [at, at + size]} for name, at in names.items()}
    ).encode()
    body = b"".join(random.Random(number + 100 * seed * (number in changed)).randbytes(size) for number in range(40))
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + body)
    return folder


def rewrite(folder: Path, *changed: int) -> None:
    """The same file, in place, with the time of its last change restored."""
    found = (folder / "model.safetensors").stat()
    tensors(folder, *changed)
    os.utime(folder / "model.safetensors", ns=(found.st_atime_ns, found.st_mtime_ns))


def touch(folder: Path, number: int) -> None:
    """What Kubernetes, SELinux or a backup do to a file without a change of a byte."""
    path = folder / "model.safetensors"
    if number % 2:
        path.chmod(0o640 if number % 4 == 1 else 0o600)
    else:
        os.link(path, folder / f"backup-{number}")


@pytest.fixture
def old(monkeypatch) -> None:
    """Files count as old at once."""
    monkeypatch.setattr(digests, "YOUNG_SECONDS", -60.0)


async def life(folder: Path, confirmation: Confirmation | None = None, started: int = 0) -> Namespace:
    """The namespace of an engine that starts now, or started then."""
    files = weight_files(config(str(folder)))
    return await refine(NAMESPACE, [note(files, started=started or time.time_ns() + LATER)], confirmation)


async def test_owner_mode_and_links_may_change_at_every_one_of_50_starts(tmp_path, old):
    folder = tensors(tmp_path / "one")
    expected = (await life(folder)).digest()
    for number in range(50):
        started = time.time_ns()
        touch(folder, number)
        confirmation = Confirmation()
        assert (await life(folder, confirmation, started)).digest() == expected
        confirmation.wait()
        assert confirmation.refutation() == ""
        confirmation.close()


@pytest.mark.parametrize("while_it_starts", [True, False])
async def test_one_tensor_of_many_changed_in_place_under_its_time_is_never_the_old_model(
    tmp_path, old, while_it_starts
):
    folder = tensors(tmp_path / "one")
    before = await life(folder)
    for number in range(40):
        started = time.time_ns()
        rewrite(folder, number)
        if while_it_starts:
            with pytest.raises(FilesChanged, match="restart it"):
                await life(folder, started=started)
        assert (await life(folder)).digest() != before.digest()


async def test_what_samples_do_not_show_is_refuted_in_the_background(tmp_path, old):
    folder = tensors(tmp_path / "one")
    before, path = await life(folder), folder / "model.safetensors"
    found, content = path.stat(), bytearray(path.read_bytes())
    content[-1500] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))
    confirmation = Confirmation()
    assert (await life(folder, confirmation)).digest() == before.digest()
    confirmation.wait()
    assert "was changed under its size and time" in confirmation.refutation()
    confirmation.accept()
    confirmation.close()
    assert (await life(folder)).digest() != before.digest()


async def test_files_touched_before_anything_is_known_of_them_are_no_identity_until_the_next_start(tmp_path, old):
    folder, started = tensors(tmp_path / "one"), time.time_ns() - LATER
    with pytest.raises(FilesChanged, match="restart it"):
        await life(folder, started=started)
    touch(folder, 1)
    assert await life(folder, started=time.time_ns())


async def test_the_same_content_written_again_is_the_same_model(tmp_path, old):
    folder = tensors(tmp_path / "one")
    expected, started = (await life(folder)).digest(), time.time_ns()
    tensors(folder)
    assert (await life(folder, started=started)).digest() == expected

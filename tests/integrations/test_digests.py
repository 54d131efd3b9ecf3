"""Digests of whole files: the content alone decides, and an unchanged file is read once."""

import json
import os
import random
import shutil
from pathlib import Path

import pytest

from kvtier.engines import digests
from kvtier.engines.digests import Cancelled, ContentDigests, FilesChanged, FileState


@pytest.fixture
def cache(tmp_path) -> Path:
    return tmp_path / "cache" / "kvtier" / "digests.json"


@pytest.fixture
def files(tmp_path) -> list[Path]:
    """Two files of weights, the first of several chunks."""
    folder = tmp_path / "model"
    folder.mkdir()
    for name, size in (("a.safetensors", 3 * digests.CHUNK_BYTES + 17), ("b.safetensors", 100)):
        (folder / name).write_bytes(random.Random(name).randbytes(size))
    return sorted(folder.iterdir())


@pytest.fixture
def read(monkeypatch) -> list[str]:
    """The names of the files that were read, in order."""
    names: list[str] = []
    original = ContentDigests._read

    def counted(self: ContentDigests, state: FileState) -> str:
        names.append(Path(state.path).name)
        return original(self, state)

    monkeypatch.setattr(ContentDigests, "_read", counted)
    return names


@pytest.fixture
def old(monkeypatch) -> None:
    """Files count as old at once."""
    monkeypatch.setattr(digests, "YOUNG_SECONDS", -60.0)


def test_a_copy_elsewhere_has_the_same_digest(files, cache, tmp_path):
    copies = tmp_path / "other"
    shutil.copytree(files[0].parent, copies)
    one = ContentDigests(cache)
    assert one.digest(files) == one.digest(sorted(copies.iterdir(), reverse=True))


def test_a_byte_changed_under_the_same_size_and_times_changes_it(files, cache, old):
    one = ContentDigests(cache)
    before, found = one.digest(files), files[0].stat()
    content = bytearray(files[0].read_bytes())
    content[len(content) // 2] ^= 1
    files[0].write_bytes(content)
    os.utime(files[0], ns=(found.st_atime_ns, found.st_mtime_ns))
    assert files[0].stat().st_mtime_ns == found.st_mtime_ns
    assert one.digest(files) != before


def test_names_count(files, cache):
    one = ContentDigests(cache)
    before = one.digest(files)
    files[1] = files[1].rename(files[1].with_name("c.safetensors"))
    assert one.digest(files) != before


def test_an_unchanged_file_is_read_once_also_by_another_process(files, cache, read, old):
    before = ContentDigests(cache).digest(files)
    assert sorted(read) == ["a.safetensors", "b.safetensors"]
    assert ContentDigests(cache).digest(files) == before
    assert len(read) == 2
    files[1].write_bytes(b"new")
    assert ContentDigests(cache).digest(files) != before
    assert read[2:] == ["b.safetensors"]


def test_a_file_that_was_just_written_is_not_remembered(files, cache, read):
    one = ContentDigests(cache)
    assert one.digest(files) == one.digest(files)
    assert len(read) == 4
    assert not cache.exists()


def test_what_is_remembered_is_the_users_own(files, cache, old):
    ContentDigests(cache).digest(files)
    assert cache.stat().st_mode & 0o777 == 0o600
    assert cache.parent.stat().st_mode & 0o777 == 0o700
    assert [path.name for path in cache.parent.iterdir()] == ["digests.json"]


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"3", b'{"x": 3}', b"[" * 100_000, b"\xff\xfe", b'{"a": 1e999}'])
def test_a_damaged_cache_is_not_used(files, cache, read, old, content):
    expected = ContentDigests(cache).digest(files)
    cache.write_bytes(content)
    assert ContentDigests(cache).digest(files) == expected
    assert len(read) == 4


def test_a_cache_that_others_may_write_is_not_used(files, cache, old):
    one = ContentDigests(cache)
    expected = one.digest(files)
    entries = json.loads(cache.read_text())
    cache.write_text(json.dumps(dict.fromkeys(entries, "0" * 64)))
    cache.chmod(0o600)
    assert one.digest(files) != expected, "the test must be able to forge an entry"
    cache.chmod(0o622)
    assert one.digest(files) == expected


def test_without_a_place_for_the_cache_it_works(files, tmp_path, old):
    (tmp_path / "file").write_text("")
    one = ContentDigests(tmp_path / "file" / "digests.json")
    assert one.digest(files) == one.digest(files)


def test_a_file_changed_while_it_is_read_is_no_digest(files, cache, monkeypatch):
    states = iter([FileState.of(files[0]), FileState.of(files[1])])
    monkeypatch.setattr(FileState, "of", lambda path: next(states))
    with pytest.raises(FilesChanged, match=r"a\.safetensors was changed while it was read"):
        ContentDigests(cache).digest(files[:1])


def test_a_missing_file_is_an_error(files, cache):
    with pytest.raises(FileNotFoundError):
        ContentDigests(cache).digest([*files, files[0].with_name("gone")])


def test_reading_can_be_cancelled(files, cache):
    one = ContentDigests(cache)
    one.cancel()
    with pytest.raises(Cancelled):
        one.digest(files)


def test_many_files_are_bounded(cache, tmp_path, monkeypatch, old):
    monkeypatch.setattr(digests, "ENTRIES_MAX", 5)
    for number in range(8):
        path = tmp_path / f"{number}.bin"
        path.write_bytes(b"x")
        ContentDigests(cache).digest([path])
    assert [Path(name.split("|")[0]).name for name in json.loads(cache.read_text())] == [
        f"{n}.bin" for n in range(3, 8)
    ]

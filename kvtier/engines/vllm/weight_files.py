"""The files from which vLLM loaded a model's weights, as far as they are on this host.

vLLM loads the folder or repository that `model` names, and then each source that the built model lists in
`secondary_weights`: the language model of an Ultravox, a subfolder of a Kimi-Audio. A few of its models read a file
beside those by themselves.
"""

import hashlib
import json
import os
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from torch import nn
from vllm import envs
from vllm.config import VllmConfig

from kvtier.engines.digests import WEIGHTS, ContentDigests, FilesChanged, FilesContent

FROM_FILES = ("auto", "hf", "safetensors", "pt", "gguf", "npcache", "mistral", "bitsandbytes", "sharded_state")
"""The `load_format`s that read files of a folder, and nothing else."""
READ_BY_MODELS = ("audio_tokenizer", "adapters/*")
"""Folders of a model in which classes of vLLM find weights by themselves: MiMo-Audio, Jina embeddings."""
AFTER_START = "after this process had started, so what was loaded is not known; restart it"
HUB_SNAPSHOT = re.compile(r"/models--[^/]+/snapshots/[0-9a-f]{40}(/|$)")
TICK_NANOSECONDS = 1_000_000_000 // os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class FileSource:
    """A folder, or one file, and which of its files are read. `name` is unique, and equal on all hosts."""

    name: str
    place: str
    patterns: tuple[str, ...] = WEIGHTS

    def files(self) -> dict[str, Path]:
        """The files that are there, by names that do not depend on where the place is."""
        place = Path(self.place)
        if place.is_file():
            return {place.name: place}
        found = sorted({file for pattern in self.patterns for file in place.glob(pattern)})
        return {str(file.relative_to(place)): file for file in found}

    @property
    def paths(self) -> list[Path]:
        """The paths of the files."""
        return list(self.files().values())

    def named(self) -> list[tuple[str, Path]]:
        """The files with the source's own name before theirs."""
        return [(f"{self.name}/{name}", path) for name, path in self.files().items()]

    @property
    def in_hub(self) -> bool:
        """True for a snapshot of the hub's cache, whose files are named by their contents."""
        return HUB_SNAPSHOT.search(self.place) is not None

    def moved_since(self, moment: int) -> Iterator[str]:
        """Links on the way to the files that were made after a moment, in nanoseconds of the clock of files, and the
        folder if it was renamed: what was loaded may be somewhere else now."""
        place = Path(self.place)
        files = () if self.in_hub else self.paths
        links = [path for path in (place, *place.parents, *files) if path.is_symlink()]
        yield from (str(path) for path in links if path.lstat().st_ctime_ns > moment)
        about = place.stat()
        if place.is_dir() and about.st_mtime_ns <= moment < about.st_ctime_ns:
            yield self.place


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """The folders of the weights of an engine's models: `main` are the models, drafts included, `more` what they load
    from elsewhere. `listed` is a digest of the names and sizes of all files when they were seen."""

    main: tuple[FileSource, ...]
    more: tuple[FileSource, ...]
    listed: str

    @classmethod
    def seen(cls, main: Sequence[FileSource], more: Sequence[FileSource] = ()) -> "WeightFiles":
        """The files as they are now. Raises OSError for one that cannot be seen."""
        files = [*_named(main), *_named(more)]
        sizes = sorted((name, path.stat().st_size) for name, path in files)
        return cls(tuple(main), tuple(more), hashlib.sha256(json.dumps(sizes).encode()).hexdigest()[:32])

    @property
    def sources(self) -> tuple[FileSource, ...]:
        """All of them."""
        return self.main + self.more

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "WeightFiles":
        main, more = (
            tuple(FileSource(each["name"], each["place"], tuple(each["patterns"])) for each in value[key])
            for key in ("main", "more")
        )
        return cls(main, more, str(value["listed"]))

    def read(self, digests: ContentDigests, since: int) -> tuple[FilesContent, FilesContent | None]:
        """The content of the models' files, and of those from elsewhere if there are any.

        Raises FilesChanged if it is not what was loaded since the moment `since`, in nanoseconds of the clock of files.
        """
        if WeightFiles.seen(self.main, self.more).listed != self.listed:
            raise FilesChanged("files of weights came, went or grew while the engine started; restart it")
        if moved := [path for source in self.sources for path in source.moved_since(since)]:
            raise FilesChanged(f"{', '.join(moved)} was put there {AFTER_START}")
        main = digests.content([(path.name, path) for _, path in _named(self.main)], by_samples=True)
        more = digests.content(_named(self.more), by_samples=True) if _named(self.more) else None
        in_hub = {str(path.resolve()) for source in self.sources if source.in_hub for path in source.paths}
        read = [file for each in (main, more) if each for file in each.files if file.state.path not in in_hub]
        if changed := digests.changed_since(read, since):
            raise FilesChanged(f"{', '.join(changed)} was changed {AFTER_START}")
        return main, more


def _named(sources: Sequence[FileSource]) -> list[tuple[str, Path]]:
    return [pair for source in sources for pair in source.named()]


def weight_files(config: VllmConfig, built: Sequence[nn.Module] = ()) -> WeightFiles | None:
    """The files of this engine's weights, with those that the `built` models load from elsewhere; None if some are not
    in files of this host."""
    models = [config.model_config]
    if config.speculative_config is not None and config.speculative_config.draft_model_config is not None:
        models.append(config.speculative_config.draft_model_config)
    if str(config.load_config.load_format) not in FROM_FILES or any(model.model_weights for model in models):
        return None
    download_dir = config.load_config.download_dir
    places = list(dict.fromkeys(find_place(model.model, model.revision, download_dir) for model in models))
    main = [FileSource("", place) for place in places]
    if not all(places) or not all(source.paths for source in main):
        return None
    more = [FileSource("", place, _inside(folder)) for place in places for folder in READ_BY_MODELS]
    for number, given in enumerate(secondary_sources(built)):
        place = find_place(given.model_or_path, given.revision, download_dir)
        if not place:
            return None
        patterns = tuple(given.allow_patterns_overrides or (*WEIGHTS, "config.json"))
        name = f"{number} {given.prefix}{given.subfolder or ''}"
        more.append(FileSource(name, str(Path(place, given.subfolder or "")), patterns))
    loaded = {path for source in main for path in source.paths}
    return WeightFiles.seen(main, [source for source in more if not loaded.issuperset(source.paths)])


def secondary_sources(built: Sequence[nn.Module]) -> list[Any]:
    """The sources of weights that built models name beside the one that the engine was started with."""
    models = sorted(built, key=lambda model: type(model).__qualname__)
    return [source for model in models for source in getattr(model, "secondary_weights", ())]


def _inside(folder: str) -> tuple[str, ...]:
    return tuple(f"{folder}/{pattern}" for pattern in (*WEIGHTS, "*config.json"))


def find_place(model: str, revision: str | None, download_dir: str | None) -> str:
    """The folder or the file of a model; of one that is fetched by name its folder in the hub's cache. Empty if it is
    not on this host, or in the cache of another hub."""
    if Path(model).exists():
        return str(Path(model).absolute())
    if envs.VLLM_USE_MODELSCOPE:
        return ""
    try:
        return str(snapshot_download(model, revision=revision, cache_dir=download_dir, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        return ""


def moved_references(config: VllmConfig, places: Sequence[str]) -> list[str]:
    """Snapshots of the hub's cache of which it is not known if they are those that were loaded.

    vLLM follows a branch at each file. If it moved after this process had started, and the snapshot is not the one that
    the configuration was read from, another one with other files may have been loaded.
    """
    commits, started = set(_commits(config.model_config.hf_config)), started_at()
    return [place for place in places if _may_have_moved(Path(place), commits, started)]


def _may_have_moved(place: Path, commits: set[str], started: int) -> bool:
    snapshots, references = place.parent, place.parent.parent / "refs"
    if snapshots.name != "snapshots" or place.name in commits:
        return False
    moved = [path for path in references.rglob("*") if path.is_file() and path.stat().st_ctime_ns > started]
    if not any(path.read_text().strip() == place.name for path in moved):
        return False
    return any(_differ(place, other) for other in snapshots.iterdir() if other != place)


def _differ(one: Path, other: Path) -> bool:
    """True if a file of both snapshots that vLLM may read has another content in each."""
    names = {file.relative_to(one) for pattern in (*WEIGHTS, "*.json", "*.py") for file in one.glob(pattern)}
    return any((other / name).exists() and (other / name).resolve() != (one / name).resolve() for name in names)


def _commits(config: object) -> Iterator[str]:
    """The commits that a configuration and those inside it were read from, as transformers notes them."""
    if commit := getattr(config, "_commit_hash", None):
        yield str(commit)
    for value in getattr(config, "__dict__", {}).values():
        if hasattr(value, "_commit_hash"):
            yield from _commits(value)


def started_at() -> int:
    """The start of this process, by the clock of file times, in nanoseconds."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    boot = time.time_ns() - time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    return boot + (ticks + 1) * TICK_NANOSECONDS

"""The files from which vLLM loaded a model's weights, as far as they are on this host."""

import hashlib
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from vllm.config import ModelConfig, VllmConfig

from kvtier.integrations.digests import ContentDigests, FilesChanged, FileState

PATTERNS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
FROM_FILES = ("auto", "hf", "safetensors", "pt", "gguf", "npcache", "mistral", "bitsandbytes", "sharded_state")
"""The `load_format`s that read files of a folder, and nothing else."""
TICK_NANOSECONDS = 1_000_000_000 // os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """Where the weights of a model and of its draft lie, and a digest of their files' states when they were seen."""

    places: tuple[str, ...]
    states: str

    @classmethod
    def seen(cls, places: Sequence[str]) -> "WeightFiles":
        """The files as they are now. Raises OSError for one that cannot be seen."""
        return cls(tuple(places), _states([FileState.of(path) for path in _files(places)]))

    def to_json(self) -> list[object]:
        return [list(self.places), self.states]

    @classmethod
    def from_json(cls, value: Sequence[object]) -> "WeightFiles":
        places, states = value
        assert isinstance(places, list)
        return cls(tuple(places), str(states))

    def digest(self, digests: ContentDigests) -> str:
        """The digest of the files' names and contents. Raises FilesChanged if they are not those that were seen."""
        found = digests.digest(_files(self.places))
        if WeightFiles.seen(self.places) != self:
            raise FilesChanged(f"files of weights in {', '.join(self.places)} were changed while the engine started")
        return found


def weight_files(config: VllmConfig) -> WeightFiles | None:
    """The files of this engine's weights; None if some are not in files of this host."""
    models = [config.model_config]
    if config.speculative_config is not None and config.speculative_config.draft_model_config is not None:
        models.append(config.speculative_config.draft_model_config)
    if str(config.load_config.load_format) not in FROM_FILES or any(model.model_weights for model in models):
        return None
    places = [_place(model, config.load_config.download_dir) for model in models]
    if not all(places) or not all(_files([place]) for place in places):
        return None
    return WeightFiles.seen(list(dict.fromkeys(places)))


def _place(model: ModelConfig, download_dir: str | None) -> str:
    """The folder or the file of a model's weights; of a model that is fetched by name its folder in the hub's cache."""
    if Path(model.model).exists():
        return str(Path(model.model).resolve())
    try:
        return str(
            snapshot_download(model.model, revision=model.revision, cache_dir=download_dir, local_files_only=True)
        )
    except (LocalEntryNotFoundError, HFValidationError):
        return ""


def _files(places: Sequence[str]) -> list[Path]:
    files = []
    for place in map(Path, places):
        files += [place] if place.is_file() else sorted({file for each in PATTERNS for file in place.glob(each)})
    return files


def _states(states: Sequence[FileState]) -> str:
    return hashlib.sha256(json.dumps(states).encode()).hexdigest()


def changed_since_start(files: WeightFiles) -> bool:
    """True if a file was written, replaced or renamed after this process had started: it is unknown then which of the
    two was loaded. Files of the hub's cache are named by their contents, and vLLM itself may have fetched them."""
    started = _started_at()
    own = [place for place in files.places if "snapshots" not in Path(place).parts]
    return any(FileState.of(path).changed > started for path in _files(own))


def _started_at() -> int:
    """When this process began, by the clock of file times, in nanoseconds."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    boot = time.time_ns() - time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    return boot + (ticks + 1) * TICK_NANOSECONDS

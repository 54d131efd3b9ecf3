"""The identity of a model for an engine that shows its storage no weights: a name of the operator's, or a digest."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from kvtier.engines.digests import ContentDigests
from kvtier.engines.engine_memory.options import EngineMemoryOptions
from kvtier.errors import ConfigError

WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
MODEL_FILES = (*WEIGHTS, "*.json", "*.py", "*.mvn")
"""Weights; configuration, processors and index; code of the model's own; means and variances of sound."""
SUBFOLDERS = ("audio_tokenizer", "adapters/*", "whisper-large-v3")
"""Folders in which models keep weights that the engine loads beside those: MiMo-Audio, Jina embeddings, Kimi-Audio."""
REQUIRED = (
    "is required, because {engine} shows a storage backend no weights: name the weights, their quantisation, rope "
    "scaling, attention backend and code that is not the engine's, and change it when one of them changes; or write "
    "model_folder, the folder of the weights"
)


class IdentifiedOptions(EngineMemoryOptions):
    """The keys of every integration whose engine does not say which weights computed its blocks."""

    namespace: str = Field(
        default="",
        max_length=256,
        description="names all that decides the bytes and that the engine does not tell: weights and their "
        "quantisation, rope scaling, attention backend; stores with different tags never share a block",
    )
    model_folder: str = Field(
        default="",
        pattern=r"^(/.*)?$",
        description="absolute path of the folder that the weights are loaded from: its contents are digested at the "
        "start, and blocks of other contents are never shared",
    )
    allow_untested_engine: bool = Field(default=False, description="serve from an untested release of the engine")

    def require_identity(self, engine: str, at: str) -> None:
        """Raise ConfigError unless something identifies the weights."""
        if not self.namespace and not self.model_folder:
            raise ConfigError(REQUIRED.format(engine=engine), f"{at}.namespace")

    def weights_digest(self, at: str) -> str:
        """The digest of `model_folder`; empty without one. Takes as long as reading it, the first time.

        Raises ConfigError for a folder without weights.
        """
        if not self.model_folder:
            return ""
        folder = Path(self.model_folder)
        files = {file for pattern in MODEL_FILES for file in folder.glob(pattern)}
        if not any(file.match(pattern) for file in files for pattern in WEIGHTS):
            raise ConfigError(
                f"{self.model_folder} has no files of weights ({', '.join(WEIGHTS)})", f"{at}.model_folder"
            )
        files |= {file for part in SUBFOLDERS for pattern in MODEL_FILES for file in folder.glob(f"{part}/{pattern}")}
        named = [(str(file.relative_to(folder)), file) for file in sorted(files)]
        return ContentDigests().content(named).digest

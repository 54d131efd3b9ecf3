"""What tells the KV bytes of one model from those of another, as the workers of an engine find it.

The scheduler builds its side without vLLM's whole configuration; the workers have it, and the weights. They write
it into the shared region as a note, and the coordinator adds it to the namespace before it opens a lower tier.
"""

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from vllm.config.vllm import get_current_vllm_config_or_none

from kvtier.errors import ConfigError
from kvtier.types.dtypes import canonical_dtype
from kvtier.types.geometry import KVLayout
from kvtier.types.namespace import Namespace

WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
SAMPLES = 16
SAMPLE_BYTES = 65536

_log = logging.getLogger(__name__)


def worker_note(layout: KVLayout) -> str:
    """This worker's note as JSON: its pages, model, weights, hash algorithm. Equal on all workers of an engine."""
    known: dict[str, str] = {"pages": _digest(repr([(group.refs, group.padding_bytes) for group in layout.groups]))}
    config = get_current_vllm_config_or_none()
    if config is not None:
        model = config.model_config
        known |= {
            "revision": str(model.revision),
            "model_config": _digest(json.dumps(model.hf_config.to_dict(), sort_keys=True, default=str)),
            "weights": weights_identity(Path(model.model)),
            "hash_algorithm": str(config.cache_config.prefix_caching_hash_algo),
            "cache_dtype": canonical_dtype(str(config.cache_config.cache_dtype)),
            "attention_backend": str(config.attention_config.backend),
            "quantization": str(model.quantization),
        }
    return json.dumps(known, sort_keys=True)


def refine(namespace: Namespace, notes: Sequence[str]) -> Namespace:
    """The namespace with what the workers' notes add. Raises ConfigError if they differ, or if nothing identifies the
    weights: the operator has to name them then."""
    if len(set(notes)) != 1:
        raise ConfigError(f"the workers of this engine disagree about the model: {sorted(set(notes))}", "workers")
    known: dict[str, str] = json.loads(notes[0]) if notes[0] else {}
    weights = known.pop("weights", "")
    algorithm = known.pop("hash_algorithm", "")
    if "xxhash" in algorithm:
        _log.warning(
            "prefix_caching_hash_algo %s draws a new seed in every process unless PYTHONHASHSEED is set: "
            "without it nothing on disk is ever hit after a restart; use sha256",
            algorithm,
        )
    return with_weights(replace(namespace, hash_algorithm=algorithm), weights, "stack.namespace", known)


def with_weights(namespace: Namespace, weights: str, tag_key: str, extra: Mapping[str, str]) -> Namespace:
    """The namespace of these weights, with `extra` beside what it has.

    Raises ConfigError if neither a digest of weights nor the operator's tag, whose key is `tag_key`, identifies them.
    """
    if not weights and not namespace.tag:
        raise ConfigError(
            "is required: nothing tells these weights from others of the same model, so name them yourself", tag_key
        )
    return replace(namespace, weights=weights, extra={**namespace.extra, **extra})


def weights_identity(folder: Path) -> str:
    """A digest of a local model's weight files: names, sizes, times and samples of their bytes. Empty if there are
    none, as for a model that is fetched by name."""
    files = sorted({path for pattern in WEIGHTS for path in folder.glob(pattern)}) if folder.is_dir() else []
    if not files:
        return ""
    digest = hashlib.sha256()
    for path in files:
        found = path.stat()
        digest.update(f"{path.name} {found.st_size} {found.st_mtime_ns}\n".encode())
        with path.open("rb") as file:
            for sample in range(SAMPLES):
                file.seek(max(0, found.st_size - SAMPLE_BYTES) * sample // (SAMPLES - 1))
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()[:32]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]

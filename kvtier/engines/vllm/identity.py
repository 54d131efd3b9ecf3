"""The identity of a model's KV bytes, as the workers of an engine find it.

The scheduler builds its side without vLLM's whole configuration and without the model; the workers have both. They
write what they see into the shared region as a note, and the coordinator adds it to the namespace before it opens a
lower tier. The weights are identified by the contents of their files alone, so that hosts share blocks whatever the
folders and times of their copies are.
"""

import asyncio
import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, TypeVar

from torch import nn
from vllm.config import VllmConfig
from vllm.config.vllm import get_current_vllm_config_or_none

from kvtier.engines.digests import Confirmation, ContentDigests, FilesChanged
from kvtier.engines.fingerprint import computed_state, computing_modules
from kvtier.engines.vllm.compat import LOGGER
from kvtier.engines.vllm.engine_config import attention_layers
from kvtier.engines.vllm.engine_settings import settings_files, settings_of
from kvtier.engines.vllm.model_code import ModelCode
from kvtier.engines.vllm.weight_files import WeightFiles, moved_references, started_at, weight_files
from kvtier.errors import ConfigError, ResourceError
from kvtier.types.dtypes import AUTO, canonical_dtype
from kvtier.types.geometry import KVLayout, TensorRef
from kvtier.types.namespace import Namespace

PLACES = ("_name_or_path",)
"""Fields of a model's configuration that hold its place on this host."""
ADDED = (
    *("secondary_weights", "code", "releases", "setting_files"),
    *("environment", "multimodal", "quantization_config", "code_revision"),
    *("states", "lora", "fp8", "arguments"),
)
"""Fields that a namespace has only where a model or an engine has what they name."""
UNSURE_MAX = 3
"""Files that may have changed and are named in a note, which is short."""
T = TypeVar("T")

_log = logging.getLogger(__name__)


def worker_note(layout: KVLayout, models: Sequence[nn.Module]) -> str:
    """This worker's note as JSON: its pages, its `models` and their layers, files of weights, hash algorithm."""
    known: dict[str, Any] = {
        "pages": _digest(repr([group.refs for group in layout.groups])),
        "page_bytes": [group.page_bytes for group in layout.groups],
    }
    config = get_current_vllm_config_or_none()
    if config is not None:
        model = config.model_config
        fields = {key: value for key, value in model.hf_config.to_dict().items() if key not in PLACES}
        layers = _cached_layers(config)
        files = weight_files(config, models)
        known |= {
            "revision": str(model.revision),
            "model_config": _digest(json.dumps(fields, sort_keys=True, default=str)),
            "architectures": ",".join(model.architectures),
            "hash_algorithm": str(config.cache_config.prefix_caching_hash_algo),
            "cache_dtype": canonical_dtype(str(config.cache_config.cache_dtype)),
            "quantization": str(model.quantization),
            "load_format": str(config.load_config.load_format),
            "attention": ",".join(sorted({_kind(layer) for _, layer in layers})),
            "computed": computed_state(chain(layers, _computing_modules(models))),
            "files": None if files is None else files.to_json(),
            "started": started_at(),
        }
        known |= _states(config, layers) | settings_of(config) | beside_weights(config, models, files)
        if config.lora_config is not None and config.lora_config.lora_dtype not in ("auto", model.dtype):
            known["lora_dtype"] = str(config.lora_config.lora_dtype)
    return json.dumps(known, sort_keys=True)


def beside_weights(config: VllmConfig, models: Sequence[nn.Module], files: WeightFiles | None) -> dict[str, Any]:
    """The code that computes and the files of settings, as fields of the namespace; nothing for a model that vLLM has
    itself. `unsure` names what may have been another when it was loaded, or cannot be read."""
    started, digests = started_at(), ContentDigests()
    found: dict[str, Any] = {}
    try:
        code = ModelCode.of(models, processors=config.model_config.multimodal_config is not None)
        found |= code.fields()
        unsure = code.written_since(started)
        settings = settings_files(config, models)
        if named := [pair for source in settings for pair in source.named()]:
            found["setting_files"] = digests.content(named).digest[:32]
            own = [("", file) for source in settings if not source.in_hub for file in source.paths]
            unsure += digests.changed_since(digests.content(own).files, started)
        places = [source.place for source in (*settings, *(files.sources if files else ()))]
        unsure += moved_references(config, list(dict.fromkeys(places)))
    except (OSError, ResourceError) as error:
        unsure = [str(error)]
    return found | ({"unsure": unsure[:UNSURE_MAX]} if unsure else {})


def _cached_layers(config: VllmConfig) -> list[tuple[str, nn.Module]]:
    """The layers that have a KV cache, by their names. Empty KV caches are those of encoders."""
    return [(name, layer) for name, layer in attention_layers(config).items() if hasattr(layer, "get_kv_cache_spec")]


def _computing_modules(models: Sequence[nn.Module]) -> Iterable[tuple[str, nn.Module]]:
    if not models:
        raise ConfigError("the model around vLLM's attention layers was not found: kvtier cannot tell what it computes")
    for number, model in enumerate(sorted(models, key=lambda model: type(model).__qualname__)):
        for name, module in computing_modules(model):
            yield f"{number}.{name}", module


def _kind(layer: Any) -> str:
    """The attention that a layer really has: backend, its implementation, and on CPUs the order of K in a block."""
    implementation = type(getattr(layer, "impl", None)).__name__
    return f"{layer.get_attn_backend().get_name()}/{implementation}/{getattr(layer, 'isa', '')}"


def _states(config: VllmConfig, layers: Iterable[tuple[str, Any]]) -> dict[str, str]:
    """The element types of recurrent states, as a field of the namespace. None for those of the KV cache's own type, of
    which the last may be float32: then the sizes in a page show which."""
    cache_dtype = str(config.cache_config.cache_dtype)
    usual = canonical_dtype(str(config.model_config.dtype) if cache_dtype == AUTO else cache_dtype)
    found = set()
    for _, layer in layers:
        dtypes = [canonical_dtype(str(each)) for each in getattr(layer, "get_state_dtype", tuple)()]
        if not ({*dtypes[:-1]} <= {usual} and {*dtypes[-1:]} <= {usual, "float32"}):
            found.add(f"{type(layer).__name__}/{'/'.join(dtypes)}")
    return {"states": ",".join(sorted(found))} if found else {}


def measure(layout: KVLayout, notes: Sequence[str]) -> KVLayout:
    """The layout with the bytes of a page that each group really has, by the workers' notes.

    Raises ConfigError if they contradict each other.
    """
    found = [json.loads(note).get("page_bytes") for note in notes]
    if any(each != found[0] for each in found) or len(found[0]) != len(layout.groups):
        raise ConfigError(f"the workers of this engine disagree about the bytes of a page: {found}", "workers")
    pages = zip(layout.groups, found[0], strict=True)
    return replace(layout, groups=[replace(group, refs=(TensorRef(0, page),)) for group, page in pages])


async def refine(namespace: Namespace, notes: Sequence[str], confirmation: Confirmation | None = None) -> Namespace:
    """The namespace with what the workers' notes add. Takes as long as reading the weights, the first time.

    Where only owner, mode or links of a file changed since it was read, samples of it suffice, and `confirmation` reads
    the whole in the background. Raises ConfigError if the workers differ, or if nothing identifies the weights: the
    operator has to name them then. Raises FilesChanged if the files are not those that were loaded.
    """
    confirmation = confirmation or Confirmation()
    found: list[dict[str, Any]] = [json.loads(note or "{}") for note in notes]
    computed = [str(each.pop("computed", "")) for each in found]  # a rank may compute with experts of its own
    started = min(int(each.pop("started", 0)) for each in found)
    unsure = [path for each in found for path in each.pop("unsure", ())]
    listed = {json.dumps(each.pop("files", None), sort_keys=True) for each in found}
    if any(each != found[0] for each in found):
        raise ConfigError(f"the workers of this engine disagree about the model: {sorted(set(notes))}", "workers")
    known = found[0]
    known.pop("page_bytes", None)  # part of the layout
    algorithm = str(known.pop("hash_algorithm", ""))
    if "xxhash" in algorithm:
        _log.warning(
            "prefix_caching_hash_algo %s draws a new seed in every process unless PYTHONHASHSEED is set: "
            "without it nothing on disk is ever hit after a restart; use sha256",
            algorithm,
        )
    files = json.loads(max(listed))
    if not files and not namespace.tag:
        raise ConfigError(
            "is required: nothing tells these weights from others of the same model, so name them yourself",
            "stack.namespace",
        )
    if unsure or len(listed) > 1:
        paths = ", ".join(unsure) or "files of weights"
        raise FilesChanged(f"{paths} may have changed after this process had started; restart it")
    if files:
        read = partial(WeightFiles.from_json(files).read, confirmation.digests, started)
        main, more = await _in_thread(read, confirmation.digests)
        confirmation.begin([*main.sampled, *(more.sampled if more else ())])
        namespace = replace(namespace, weights=main.digest, model=str(known.pop("architectures")))
        known |= {"secondary_weights": more.digest} if more else {}
    if added := [name for name in ADDED if name in known]:
        logging.getLogger(LOGGER).info(
            "the namespace also names %s, which kvtier 0.1.0 did not: what that stored for this model is not found; "
            "`kvtier gc ROOT --all-but DIGEST` drops it",
            ", ".join(added),
        )
    extra = {**namespace.extra, **known, "computed": _digest(json.dumps(computed))}
    return replace(namespace, hash_algorithm=algorithm, extra=extra)


async def _in_thread(read: Callable[[], T], digests: ContentDigests) -> T:
    try:
        return await asyncio.to_thread(read)
    except asyncio.CancelledError:
        digests.cancel()
        raise


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]

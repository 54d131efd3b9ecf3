"""Options of a tier below another engine's memory, beside those of its backend, and the identity of a model in them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from pydantic import Field, create_model

from kvtier.client.private import PATH_BYTES_MAX
from kvtier.config.load import validate
from kvtier.engines.digests import WEIGHTS, ContentDigests
from kvtier.engines.engine_release import EngineRelease
from kvtier.errors import ConfigError
from kvtier.options import ByteSize, FitsEngine, LowerTierOptions, Seconds, share_of
from kvtier.tier.registry import discover

RESTART_SECONDS = 30.0
"""How long opening waits for folders that the engine before, which is ending, still owns."""
HANDS_DOWN = "the engine hands blocks down when it has them; leave it out"
SAYS_NO_USES = "the engine does not say which of its blocks were used again; leave it out"


class EngineMemoryOptions(LowerTierOptions):
    """Options of a tier below an engine: bounds of what passes between both, and of the time that it may take."""

    inflight_bytes: ByteSize = Field(
        default=128 << 20, description="memory that blocks in flight pass through, one half for each direction"
    )
    copy_threads: int = Field(default=2, ge=1, le=64, description="threads that copy and hash, at most")
    lease_seconds: Seconds = Field(
        default=10.0, description="how long a block that was found is kept for its load, at most"
    )
    drain_timeout_seconds: Seconds = Field(
        default=3.0, description="how long a shutdown or a reset waits for blocks in flight"
    )
    close_timeout_seconds: Seconds = Field(default=2.0, description="how long closing waits for I/O in flight")
    stats_socket: str = Field(
        default="",
        pattern=r"^(/.*)?$",
        max_length=100,
        description="absolute path of a Unix socket that serves figures to kvtier top; none when left out",
    )


OptionsT = TypeVar("OptionsT", bound=EngineMemoryOptions)


def engine_part(options: OptionsT, index: int, count: int) -> OptionsT:
    """The options of engine `index` of `count`: its share of the tier, and a socket of its own."""
    shared = share_of(options, index, count)
    if count == 1 or not options.stats_socket:
        return shared
    return shared.model_copy(update={"stats_socket": f"{options.stats_socket}-{index}"})


@cache
def options_model(own: type[OptionsT], backend: str, title: str) -> type[OptionsT]:
    """The keys of an integration, `own`, and those of an installed backend, in one strict model.

    Raises ConfigError for a backend that is not installed, or that is no tier below the CPU.
    """
    of_backend = discover().get(backend).Options
    if not issubclass(of_backend, LowerTierOptions):
        raise ConfigError(f"{backend} is no tier below the CPU; write fs, shared_fs or a remote tier", "type")
    bases: tuple[Any, ...] = (own, of_backend)
    model: type[OptionsT] = create_model(title, __base__=bases)
    return model


def read_options(own: type[OptionsT], backend: str, keys: Mapping[str, Any], at: str) -> OptionsT:
    """The options of a tier below an engine. Raises ConfigError with one line for each thing that is wrong, as `at`.

    Options that need more facts of blocks than an engine gives are refused.
    """
    options: OptionsT = validate(
        options_model(own, backend, f"{backend} below an engine"), {"type": backend, **keys}, at
    )
    if options.write_policy != "write_through":
        raise ConfigError(HANDS_DOWN, f"{at}.write_policy")
    if options.admit != "always":
        raise ConfigError(SAYS_NO_USES, f"{at}.admit")
    if isinstance(options, FitsEngine):
        fitted: Any = options
        options = fitted.for_engine(RESTART_SECONDS)
    return options


MODEL_FILES = (*WEIGHTS, "*.json", "*.py", "*.mvn")
"""Weights; configuration, processors and index; code of the model's own; means and variances of sound."""
SUBFOLDERS = ("audio_tokenizer", "adapters/*", "whisper-large-v3")
"""Folders in which models keep weights that the engine loads beside those: MiMo-Audio, Jina embeddings, Kimi-Audio."""
REQUIRED = (
    "is required, because {engine} shows a storage backend no weights: name the weights, their quantisation, rope "
    "scaling, adapters, attention backend and code that is not the engine's, and change it when one of them changes; "
    "or write model_folder, the folder of the weights"
)


class IdentifiedOptions(EngineMemoryOptions):
    """The keys of every integration whose engine does not name the weights that computed its blocks."""

    namespace: str = Field(
        default="",
        max_length=256,
        description="names all that decides the bytes and that the engine does not tell: weights and their "
        "quantisation, rope scaling, adapters, attention backend; stores with different tags never share a block",
    )
    model_folder: str = Field(
        default="",
        pattern=r"^(/.*)?$",
        description="absolute path of the folder that the weights are loaded from: its contents are digested at the "
        "start, and blocks of other contents are never shared",
    )
    allow_untested_engine: bool = Field(default=False, description="serve from an untested release of the engine")

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


class ServiceOptions(IdentifiedOptions):
    """The keys of an integration that a `kvtier serve` can serve in the place of a tier of the engine's own."""

    service: str = Field(
        default="",
        pattern=r"^(/.*)?$",
        max_length=PATH_BYTES_MAX,
        description="absolute path of the socket of a kvtier serve, in the place of type and its options: engines of "
        "one namespace share its rows and disks",
    )


IdentifiedT = TypeVar("IdentifiedT", bound=IdentifiedOptions)
OF_A_TIER = frozenset(LowerTierOptions.model_fields) | {"drain_timeout_seconds", "stats_socket"}
"""Keys of a tier of the engine's own."""


def read_service(own: type[IdentifiedT], given: Mapping[str, Any], release: EngineRelease) -> IdentifiedT:
    """The options of an engine at a service. Raises ConfigError as `read_identified`."""
    known, at = own.model_fields.keys() - OF_A_TIER, release.options
    if unknown := sorted(given.keys() - known):
        raise ConfigError(f"is no key beside service; known are {', '.join(sorted(known))}", f"{at}.{unknown[0]}")
    return _identified(validate(own, {"type": "service", **given}, at), release)


def read_identified(own: type[IdentifiedT], given: Mapping[str, Any], release: EngineRelease) -> IdentifiedT:
    """The options that an operator gives to an engine. `type` is that of the tier, `fs` when absent.

    Raises ConfigError with one line for each thing that is wrong, for weights that nothing identifies, and for a
    release that was not tested.
    """
    keys, at = dict(given), release.options
    backend = keys.pop("type", "fs")
    if not isinstance(backend, str):
        raise ConfigError("is the name of a type of tier, such as fs", f"{at}.type")
    return _identified(read_options(own, backend, keys, at), release)


def _identified(options: IdentifiedT, release: EngineRelease) -> IdentifiedT:
    """Raise ConfigError unless the options name the weights, and the release was tested."""
    if not options.namespace and not options.model_folder:
        raise ConfigError(REQUIRED.format(engine=release.name), f"{release.options}.namespace")
    release.require_tested(options.allow_untested_engine)
    return options

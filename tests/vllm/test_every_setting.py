"""No setting of vLLM decides K or V unseen: each one of the tested releases was read, a new one has to be."""

import dataclasses
import typing
from collections.abc import Iterator
from fnmatch import fnmatch
from inspect import getmodule
from typing import Any

import pytest
from settings_table import NAMED, PARTS, SETTINGS, VARIABLES_SHOWN, VARIABLES_WITHOUT_EFFECT, WITHOUT_EFFECT
from vllm import envs
from vllm.config import VllmConfig

from kvtier.engines.vllm.engine_settings import ARGUMENTS, ENVIRONMENT, LORA, MULTIMODAL

pytestmark = pytest.mark.engine

ALSO_NAMED = {
    "VllmConfig": SETTINGS["VllmConfig"][NAMED].split(),
    "ModelConfig": ["model", "dtype", "revision", "code_revision", "quantization", "quantization_config"],
    "MultiModalConfig": [*MULTIMODAL, "video_pruning_method", "mm_encoder_fp8_scale_path"],
    "CacheConfig": ["cache_dtype", "prefix_caching_hash_algo"],
    "ParallelConfig": ["cp_kv_cache_interleave_size"],
    "LoRAConfig": [*LORA, "lora_dtype"],
}
"""What the namespace has by each class, beside the arguments of `ARGUMENTS`."""


def classes() -> Iterator[type[Any]]:
    """The configurations of vLLM, from the outermost one on."""
    found: list[type[Any]] = [VllmConfig]
    for each in found:
        yield each
        hints = typing.get_type_hints(each, vars(getmodule(each)))
        kinds = [hints[field.name] for field in dataclasses.fields(each)]
        while kinds:
            kind = kinds.pop()
            if isinstance(kind, type) and dataclasses.is_dataclass(kind) and kind not in found:
                found.append(kind)
            kinds += typing.get_args(kind)


def test_each_setting_was_read():
    unread = [each.__name__ for each in classes() if each.__name__ not in (*SETTINGS, *WITHOUT_EFFECT, *PARTS)]
    for each in classes():
        read = " ".join(SETTINGS.get(each.__name__, {}).values()).split()
        assert len(read) == len(set(read)), f"{each.__name__} has a setting twice"
        if read:
            unread += [f"{each.__name__}.{field.name}" for field in dataclasses.fields(each) if field.name not in read]
    assert unread == [], "decide for each whether another value of it gives other K or V"


def test_each_variable_was_read():
    known = [*ENVIRONMENT, *VARIABLES_SHOWN.split(), *VARIABLES_WITHOUT_EFFECT.split()]
    unread = [name for name in envs.environment_variables if not any(fnmatch(name, each) for each in known)]
    assert unread == [], "decide for each whether another value of it gives other K or V"
    both = [name for name in ENVIRONMENT for each in VARIABLES_WITHOUT_EFFECT.split() if fnmatch(name, each)]
    assert both == [], "a variable that counts is not one without effect"


def test_what_the_table_says_is_named_is_in_the_namespace():
    arguments = {f"{part.removesuffix('_config')}config": names for part, names in ARGUMENTS.items()}
    for name, reasons in SETTINGS.items():
        named = [*ALSO_NAMED.get(name, ()), *arguments.get(name.lower(), ())]
        assert sorted(reasons.get(NAMED, "").split()) == sorted(named), name

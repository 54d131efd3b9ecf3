"""Stack files: from text to validated options, and from those to tiers, to a stack, and to a schema for editors."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, Field, SerializeAsAny, ValidationError

from kvtier.config.problems import collect_errors, problems_of, raise_all, short_text
from kvtier.config.strict_yaml import Value, parse_text, read_text
from kvtier.errors import ConfigError, UsageError
from kvtier.options import HintOptions, LowerTierOptions, Options, RecordOptions, Seconds, TierOptions
from kvtier.stack import StackParts, StackSettings
from kvtier.stack.assembly import order_problems
from kvtier.stack.learned.installed_policies import find_policy
from kvtier.tier.contract import LoadStore
from kvtier.tier.registry import Backends, discover, suggest
from kvtier.types.geometry import KVLayout
from kvtier.types.keys import CPU, GPU, Medium
from kvtier.types.namespace import Namespace

if TYPE_CHECKING:
    import torch

    from kvtier.stack import TierStack


class StackOptions(Options):
    """Options of the stack as a whole."""

    namespace: str = Field(
        default="", max_length=256, description="the operator's own tag: stacks with different tags never share a block"
    )
    block_size_factor: int | None = Field(
        default=None, ge=1, le=4096, description="GPU blocks in one offloaded block; the engine's own when left out"
    )
    state_dir: str = Field(
        default="",
        pattern=r"^[^\x00]*$",
        description="folder for what eviction policies have learned; the first lower tier's when left out",
    )
    open_timeout_seconds: Seconds = Field(
        default=300.0, description="how long each tier may take to open before opening the stack fails"
    )
    lookup_timeout_seconds: Seconds = Field(
        default=1.0, description="how long a request may wait for its hits; what it lacks then is a miss"
    )
    load_timeout_seconds: Seconds = Field(
        default=30.0, description="deadline of a load through the whole stack; what is late then is a miss"
    )
    store_timeout_seconds: Seconds = Field(
        default=10.0, description="deadline of a store through the whole stack; what is late then is dropped"
    )
    close_timeout_seconds: Seconds = Field(
        default=10.0,
        description="how long closing may drain what is in flight before it drops the rest, and may then take to write "
        "what policies have learned",
    )
    prefill_tokens_per_second: Literal["measured"] | Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        default=0.0,
        description="speed at which the engine computes a prompt, or measured: what a tier would load later is a miss; "
        "0: not known",
    )
    curves: bool = Field(
        default=False, description="count what each owned tier would hit at half, twice and four times its size"
    )
    stats_socket: str = Field(
        default="",
        pattern=r"^(/[^\x00\n]*)?$",
        max_length=100,
        description="absolute path of a Unix socket that serves figures to kvtier top; none when left out",
    )
    runtime_dir: str = Field(
        default="",
        pattern=r"^(/[^\x00\n]*)?$",
        max_length=80,
        description="absolute path of a folder for the socket of a stack process; XDG_RUNTIME_DIR, /run, /tmp or "
        "/dev/shm when left out",
    )
    allow: tuple[int | str, ...] = Field(
        default=(),
        max_length=64,
        description="users, by number or name, whose engines kvtier serve takes beside its user's",
    )
    group: int | str = Field(default="", description="group whose members may reach the socket of a kvtier serve")
    hints: HintOptions = Field(
        default=HintOptions(), description="bounds of hints: retained_sets, retain_time, prefetch_blocks"
    )
    record: RecordOptions | None = Field(
        default=None, description="keep an anonymised trace of what is asked: folder, max_bytes, salt_file"
    )


class StackConfig(StackOptions):
    """A whole stack: its options and its tiers from the GPU's side down."""

    tiers: tuple[SerializeAsAny[TierOptions], ...] = Field(min_length=1)


MAX_TIERS = 64
Model = TypeVar("Model", bound=BaseModel)


def load_stack(path: str | os.PathLike[str], backends: Backends | None = None) -> StackConfig:
    """The stack a YAML file describes. Raises ConfigError with one line for each thing that is wrong."""
    return parse_stack(read_text(path), backends)


def parse_stack(text: str, backends: Backends | None = None) -> StackConfig:
    """The stack a YAML text describes; `backends` are the installed ones when left out.

    Touches no device and no folder. Raises ConfigError with one line for each thing that is wrong, each line the path
    of a key as `tiers[1].cpu_bytes_to_use` and what to do.
    """
    backends = backends or discover()
    document = parse_text(text)
    if not isinstance(document, dict):
        raise ConfigError("a stack file is a mapping with the key 'tiers'")
    problems: list[ConfigError] = []
    options, tiers = StackOptions(), []
    with collect_errors(problems):
        options = validate(StackOptions, {key: value for key, value in document.items() if key != "tiers"})
    with collect_errors(problems):
        tiers = _tiers(document, backends)
        problems += tier_problems(tiers, backends)
    raise_all(problems)
    return StackConfig(tiers=tuple(tiers), **{name: getattr(options, name) for name in options.model_fields_set})


def build_tiers(config: StackConfig, backends: Backends | None = None) -> list[LoadStore]:
    """The tiers of a stack, constructed and not opened: no I/O. Raises ConfigError where the tiers do not go together
    or the class of a backend cannot be loaded."""
    backends = backends or discover()
    raise_all(tier_problems(config.tiers, backends))
    return [backends.get(options.type)(options) for options in config.tiers]


def find_tier(config: StackConfig, medium: Medium, backends: Backends | None = None) -> TierOptions | None:
    """The options of the stack's first tier of a medium."""
    known = backends or discover()
    return next((options for options in config.tiers if known.get(options.type).medium == medium), None)


def validate(model: type[Model], data: Value, at: str = "") -> Model:
    """An options model from plain values, as strict as JSON: no text for numbers, lists for tuples, text for paths."""
    try:
        return model.model_validate_json(json.dumps(data))
    except ValidationError as error:
        problems = problems_of(error, model, data, at)
    raise_all(problems)
    raise AssertionError("a validation that fails has a problem")


def _tiers(document: Mapping[str, Value], backends: Backends) -> list[TierOptions]:
    """The options of every tier. Raises ConfigError when any tier is wrong: rules across tiers need all of them."""
    raw = document.get("tiers")
    if "tiers" not in document:
        near = suggest("tiers", [*document])
        raise ConfigError(f"is required{near}; add a list of tiers, each with a type", "tiers")
    if not isinstance(raw, list) or not raw:
        raise ConfigError("must be a list of at least one tier, each with a type", "tiers")
    if len(raw) > MAX_TIERS:
        raise ConfigError(f"{len(raw)} tiers; a stack has at most {MAX_TIERS}", f"tiers[{MAX_TIERS}]")
    found: list[TierOptions] = []
    problems: list[ConfigError] = []
    for index, value in enumerate(raw):
        with collect_errors(problems):
            found.append(_tier(value, f"tiers[{index}]", backends))
    raise_all(problems)
    return found


def _tier(value: Value, at: str, backends: Backends) -> TierOptions:
    known = ", ".join(backends.names) or "none is installed"
    if not isinstance(value, dict):
        raise ConfigError(f"{short_text(value)} is no tier; write a mapping with a type ({known})", at)
    kind = value.get("type")
    if not isinstance(kind, str):
        reason = f"{short_text(kind)} is not a backend's name" if "type" in value else "is required"
        raise ConfigError(f"{reason}; write one of: {known}", f"{at}.type")
    try:
        model = backends.get(kind).Options
    except ConfigError as error:
        raise ConfigError(error.reason, f"{at}.type") from None
    problems: list[ConfigError] = []
    with collect_errors(problems):
        options = validate(model, value, at)
    policy = value.get("policy")
    if "policy" in model.model_fields and isinstance(policy, str):
        with collect_errors(problems, at):
            find_policy(policy)
    raise_all(problems)
    return options


def tier_problems(tiers: Sequence[TierOptions], backends: Backends) -> list[ConfigError]:
    """Problems between tiers that are each valid: their order, their number, their names, on_evict."""
    media = [backends.get(options.type).medium for options in tiers]
    problems = order_problems(media)
    names = [options.label for options in tiers]
    for index, (name, options) in enumerate(zip(names, tiers, strict=True)):
        first = names.index(name)
        if first != index:
            reason = f"{name!r} is already the name of tiers[{first}]; give one its own"
            problems.append(ConfigError(reason, f"tiers[{index}].name"))
        on_evict = isinstance(options, LowerTierOptions) and options.write_policy == "on_evict"
        if on_evict and media[:index][-1:] != [CPU]:
            reason = "on_evict is only for the tier directly below the CPU tier; write write_through"
            problems.append(ConfigError(reason, f"tiers[{index}].write_policy"))
    return problems


def stack_schema(backends: Backends | None = None) -> dict[str, Any]:
    """The JSON schema (draft 2020-12) of a stack file, one alternative for each installed backend.

    Raises ConfigError when an installed backend cannot be loaded.
    """
    backends = backends or discover()
    schema: dict[str, Any] = StackOptions.model_json_schema()
    definitions: dict[str, Any] = schema.pop("$defs", {})
    alternatives = []
    for name in backends.names:
        tier = backends.get(name).Options.model_json_schema(ref_template=f"#/$defs/{name}.{{model}}")
        definitions |= {f"{name}.{model}": inner for model, inner in tier.pop("$defs", {}).items()}
        tier["properties"]["type"] = {"const": name}
        tier["required"] = sorted({"type", *tier.get("required", ())})
        alternatives.append(tier)
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "kvtier stack"
    schema["properties"] = {
        "tiers": {"type": "array", "minItems": 1, "items": {"oneOf": alternatives}},
        **schema["properties"],
    }
    schema["required"] = ["tiers"]
    if definitions:
        schema["$defs"] = definitions
    return schema


SETTINGS = [field.name for field in fields(StackSettings)]
"""A setting that is a key of a stack file has the name of the key."""


def stack_parts(
    stack: str | os.PathLike[str] | StackConfig,
    layout: KVLayout | Namespace,
    tensors: Sequence[torch.Tensor] | None = None,
    backends: Backends | None = None,
    engine_id: str = "",
    model: str = "",
) -> StackParts:
    """The parts of a stack. Opens nothing. The arguments are those of `open_stack`.

    The operator's tag and block size factor of the file go into the namespace; a factor that contradicts the
    engine's is a ConfigError. A file without a gpu tier is given one with its defaults when the engine brings tensors.
    """
    backends = backends or discover()
    config = stack if isinstance(stack, StackConfig) else load_stack(stack, backends)
    namespace = _namespace(config, layout, model)
    tiers = build_tiers(config, backends)
    if tensors is not None and tiers[0].medium != GPU:
        gpu = backends.get("gpu")
        tiers.insert(0, gpu(gpu.Options(type="gpu")))
    given = {name: getattr(config, name) for name in SETTINGS if name in StackConfig.model_fields}
    settings = StackSettings(**given, **dict(config.hints))
    parts = StackParts(tiers, namespace, tensors, engine_id=engine_id, settings=settings)
    return replace(parts, record=config.record, state_dir=config.state_dir, stats_socket=config.stats_socket)


def _namespace(config: StackConfig, layout: KVLayout | Namespace, model: str) -> Namespace:
    """The engine's namespace with the operator's tag and block size factor."""
    if model and isinstance(layout, Namespace):
        raise UsageError("give the model in the namespace or as model, not both")
    namespace = layout if isinstance(layout, Namespace) else Namespace(layout, model=model)
    factor = config.block_size_factor
    if factor is not None and namespace.layout.block_size_factor not in (1, factor):
        raise ConfigError(f"the engine uses {namespace.layout.block_size_factor}", "block_size_factor")
    whole = namespace.layout if factor is None else replace(namespace.layout, block_size_factor=factor)
    return replace(namespace, layout=whole, tag=config.namespace or namespace.tag)


def open_stack(
    stack: str | os.PathLike[str] | StackConfig,
    layout: KVLayout | Namespace,
    tensors: Sequence[torch.Tensor] | None = None,
    *,
    model: str = "",
) -> TierStack:
    """A stack for `async with`, from a stack file and an engine's KV layout and KV cache tensors.

    `stack` is a path or what `parse_stack` returned. `tensors[i]` has 8-bit elements and the shape (blocks, bytes of a
    page). A Namespace in place of `layout` holds more than the model's name: weights, dtype, hash algorithm.
    """
    from kvtier.stack import TierStack

    return TierStack(stack_parts(stack, layout, tensors, model=model))

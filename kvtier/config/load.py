"""From a stack file to validated options, and from those to backends."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from kvtier.config.model import StackConfig, StackOptions, tier_name
from kvtier.config.problems import problems_of, raise_all, shown
from kvtier.config.strict_yaml import Value, parse_text, read_text
from kvtier.errors import ConfigError
from kvtier.keys import CPU, GPU
from kvtier.loadstore import LoadStore
from kvtier.options import MAX_LOWER_TIERS, LowerTierOptions, TierOptions
from kvtier.registry import Backends, discover, suggest

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
    backends = discover() if backends is None else backends
    document = parse_text(text)
    if not isinstance(document, dict):
        raise ConfigError("a stack file is a mapping with the key 'tiers'")
    problems: list[ConfigError] = []
    rest: dict[str, Value] = {key: value for key, value in document.items() if key != "tiers"}
    options = _validate(StackOptions, rest, "", problems)
    tiers = _tiers(document, backends, problems)
    if tiers:
        problems += tier_problems(tiers, backends)
    raise_all(problems)
    assert options is not None
    given = {name: getattr(options, name) for name in options.model_fields_set}
    return StackConfig(tiers=tuple(tiers), **given)


def build_tiers(config: StackConfig, backends: Backends | None = None) -> list[LoadStore]:
    """The tiers of a stack, constructed and not opened: no I/O. Raises ConfigError where the tiers do not go together
    or a backend's class cannot be had."""
    backends = discover() if backends is None else backends
    raise_all(tier_problems(config.tiers, backends))
    return [backends.get(options.type)(options) for options in config.tiers]


def validate(model: type[Model], data: Value, at: str = "") -> Model:
    """An options model from plain values, as strict as JSON: no text for numbers, lists for tuples, text for paths."""
    problems: list[ConfigError] = []
    options = _validate(model, data, at, problems)
    raise_all(problems)
    assert options is not None
    return options


def _validate(model: type[Model], data: Value, at: str, problems: list[ConfigError]) -> Model | None:
    try:
        return model.model_validate_json(json.dumps(data))
    except ValidationError as error:
        problems += problems_of(error, model, data, at)
        return None


def _tiers(document: Mapping[str, Value], backends: Backends, problems: list[ConfigError]) -> list[TierOptions]:
    """The options of every tier; empty when any tier is wrong, so rules across tiers see all of them or none."""
    raw = document.get("tiers")
    if "tiers" not in document:
        near = suggest("tiers", [*document])
        problems.append(ConfigError(f"is required{near}; add a list of tiers, each with a type", "tiers"))
        return []
    if not isinstance(raw, list) or not raw:
        problems.append(ConfigError("must be a list of at least one tier, each with a type", "tiers"))
        return []
    if len(raw) > MAX_TIERS:
        problems.append(ConfigError(f"{len(raw)} tiers; a stack has at most {MAX_TIERS}", f"tiers[{MAX_TIERS}]"))
        return []
    found = [_tier(value, f"tiers[{index}]", backends, problems) for index, value in enumerate(raw)]
    whole = [options for options in found if options is not None]
    return whole if len(whole) == len(found) else []


def _tier(value: Value, at: str, backends: Backends, problems: list[ConfigError]) -> TierOptions | None:
    known = ", ".join(backends.names) or "none is installed"
    if not isinstance(value, dict):
        problems.append(ConfigError(f"{shown(value)} is no tier; write a mapping with a type ({known})", at))
        return None
    kind = value.get("type")
    if not isinstance(kind, str):
        reason = f"{shown(kind)} is not a backend's name" if "type" in value else "is required"
        problems.append(ConfigError(f"{reason}; write one of: {known}", f"{at}.type"))
        return None
    try:
        model = backends.get(kind).Options
    except ConfigError as error:
        problems.append(ConfigError(error.reason, f"{at}.type"))
        return None
    return _validate(model, value, at, problems)


def tier_problems(tiers: Sequence[TierOptions], backends: Backends) -> list[ConfigError]:
    """What is wrong between tiers that are each valid: their order, their number, their names, on_evict."""
    problems: list[ConfigError] = []
    media = [backends.get(options.type).medium for options in tiers]
    problems += _order_problems(media)
    first_of: dict[str, int] = {}
    for index, options in enumerate(tiers):
        name = tier_name(options)
        first = first_of.setdefault(name, index)
        if first != index:
            problems.append(
                ConfigError(f"{name!r} is already the name of tiers[{first}]; give one its own", f"tiers[{index}].name")
            )
    below_cpu = media.index(CPU) + 1 if CPU in media else None
    for index, options in enumerate(tiers):
        on_evict = isinstance(options, LowerTierOptions) and options.write_policy == "on_evict"
        if on_evict and index != below_cpu:
            reason = "on_evict is only for the tier directly below the CPU tier; write write_through"
            problems.append(ConfigError(reason, f"tiers[{index}].write_policy"))
    return problems


def _order_problems(media: Sequence[str]) -> list[ConfigError]:
    problems: list[ConfigError] = []
    for index, medium in enumerate(media):
        at = f"tiers[{index}]"
        if medium == GPU and index > 0:
            problems.append(ConfigError("the GPU tier comes first, once; move or remove this one", at))
        elif medium == CPU and CPU in media[:index]:
            problems.append(ConfigError("a stack has exactly one CPU tier; remove this one", at))
        elif medium == CPU and any(above != GPU for above in media[:index]):
            problems.append(ConfigError("the CPU tier comes before every lower tier; move it up", at))
        elif index - (GPU in media[:1]) > MAX_LOWER_TIERS:
            problems.append(ConfigError(f"a stack has at most {MAX_LOWER_TIERS} tiers below the CPU tier", at))
            break
    if CPU not in media:
        reason = "a stack needs a CPU tier; add `- type: cpu` with cpu_bytes_to_use after the GPU tier"
        problems.append(ConfigError(reason, "tiers"))
    return problems

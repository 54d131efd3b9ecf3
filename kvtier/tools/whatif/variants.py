"""Changes to a stack file on the command line: `--set cpu.bytes=8GiB,16GiB --set fs.policy=arc` is a grid of two."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from kvtier.config import StackConfig
from kvtier.config.load import tier_problems, validate
from kvtier.config.problems import raise_all
from kvtier.config.strict_yaml import parse_text
from kvtier.errors import ConfigError
from kvtier.options import TierOptions, parse_size
from kvtier.tier.registry import discover, suggest
from kvtier.tools.replay.setup import with_slots
from kvtier.types.geometry import Geometry
from kvtier.types.keys import CPU

VARIANTS_MAX = 64
Changes = Mapping[str, str]
"""`tier.option` to the text of its value."""


def grid(settings: Sequence[str]) -> Sequence[Changes]:
    """Every combination of the values, in the order given; one without changes if there are no settings."""
    axes = [_axis(setting) for setting in settings]
    names = [name for name, _ in axes]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{name} is set twice; give its values in one, separated by commas", "--set")
    found = [dict(zip(names, values, strict=True)) for values in itertools.product(*(values for _, values in axes))]
    if len(found) > VARIANTS_MAX:
        raise ConfigError(f"a grid of {len(found)} variants; at most {VARIANTS_MAX}", "--set")
    return found


def _axis(setting: str) -> tuple[str, list[str]]:
    name, equals, text = setting.partition("=")
    values = [value.strip() for value in text.split(",")]
    if not equals or "." not in name or not all(values):
        raise ConfigError(f"{setting!r} is no TIER.OPTION=VALUE[,VALUE...]", "--set")
    return name.strip(), values


def apply(config: StackConfig, changes: Changes, geometry: Geometry) -> StackConfig:
    """The stack with the changes. `bytes` is a tier's capacity, `blocks` the least capacity that holds this number; any
    other name is an option of the tier. Raises ConfigError for a tier or an option that there is not."""
    tiers = list(config.tiers)
    for name, text in changes.items():
        label, _, option = name.partition(".")
        index = _index_of(tiers, label)
        tiers[index] = _with_change(tiers[index], option, text, geometry)
    raise_all(tier_problems(tiers, discover()))
    return config.model_copy(update={"tiers": tuple(tiers)})


def _index_of(tiers: Sequence[TierOptions], label: str) -> int:
    labels = [tier.label for tier in tiers]
    if label not in labels:
        raise ConfigError(f"the stack has no tier {label!r}{suggest(label, labels)} ({', '.join(labels)})", "--set")
    return labels.index(label)


def _with_change(tier: TierOptions, option: str, text: str, geometry: Geometry) -> TierOptions:
    if option == "bytes":
        return tier.with_capacity(_size(text))
    if option == "blocks":
        if not text.isdecimal() or not int(text):
            raise ConfigError(f"{text!r} is no number of blocks", f"--set {tier.label}.blocks")
        if discover().get(tier.type).medium == CPU:
            return tier.with_capacity(int(text) * geometry.row_bytes)
        return with_slots(tier, geometry, int(text))
    document = parse_text(f"value: {text}")
    assert isinstance(document, dict)
    kept = tier.model_dump(mode="json", exclude_unset=True) | {"type": tier.type}
    return validate(type(tier), kept | {option: document["value"]}, f"--set {tier.label}")


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise ConfigError(str(error), "--set") from None

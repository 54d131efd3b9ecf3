"""Stack files: strict YAML, validated options, and the backends they describe."""

from kvtier.config.assemble import open_stack, stack_parts
from kvtier.config.load import build_tiers, load_stack, parse_stack
from kvtier.config.model import StackConfig, StackOptions, tier_name
from kvtier.config.schema import stack_schema

__all__ = [
    "StackConfig",
    "StackOptions",
    "build_tiers",
    "load_stack",
    "open_stack",
    "parse_stack",
    "stack_parts",
    "stack_schema",
    "tier_name",
]

"""Stack files and KV layouts as text: strict YAML, options, errors, plans; only this room makes a stack from a file."""

from kvtier.config.load import (
    StackConfig,
    StackOptions,
    build_tiers,
    find_tier,
    load_stack,
    open_stack,
    parse_stack,
    stack_parts,
    stack_schema,
)

__all__ = ["build_tiers", "find_tier", "load_stack", "parse_stack"]
__all__ += ["StackConfig", "StackOptions"]
__all__ += ["stack_schema"]
__all__ += ["open_stack", "stack_parts"]

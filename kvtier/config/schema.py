"""The JSON schema of stack files, for editors: what the installed backends accept."""

from typing import Any

from kvtier.config.model import StackOptions
from kvtier.tier.registry import Backends, discover


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

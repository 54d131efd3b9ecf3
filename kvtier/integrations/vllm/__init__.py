"""vLLM serves from a tier stack: `spec_name: KVTierSpec`, `spec_module_path: kvtier.integrations.vllm`.

Needs vLLM of a supported generation; importing this package without one raises ConfigError with what is supported.
"""

from kvtier.integrations.vllm.compat import require_supported

require_supported()

from kvtier.integrations.vllm.primary.spec import KVTierSpec  # noqa: E402
from kvtier.integrations.vllm.secondary.tier import KVTierFs, KVTierSharedFs  # noqa: E402

__all__ = ["KVTierFs", "KVTierSharedFs", "KVTierSpec"]

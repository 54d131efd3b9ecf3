"""vLLM serves from a tier stack: `spec_name: KVTierSpec`, `spec_module_path: kvtier.engines.vllm`.

Needs vLLM of a supported generation; importing this package without one raises ConfigError with what is supported.
"""

from kvtier.engines.vllm.compat import require_supported

require_supported()

from kvtier.engines.vllm.primary.connector import KVTierConnector  # noqa: E402
from kvtier.engines.vllm.primary.spec import KVTierSpec  # noqa: E402
from kvtier.engines.vllm.secondary import KVTierFs, KVTierSharedFs  # noqa: E402

__all__ = ["KVTierConnector", "KVTierFs", "KVTierSharedFs", "KVTierSpec"]

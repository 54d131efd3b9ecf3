"""vLLM over kvtier: `primary`, a whole stack, or `secondary`, a tier below vLLM's CPU tier; vLLM's processes call it.

`KVTierSpec` with `spec_module_path`, `KVTierFs` and `KVTierSharedFs` with `module_path`, are `kvtier.engines.vllm`'s.
Needs vLLM of a supported generation; importing this package without one raises ConfigError with what is supported.
"""

from kvtier.engines.vllm.compat import require_supported

require_supported()

from kvtier.engines.vllm.primary.connector import KVTierConnector  # noqa: E402
from kvtier.engines.vllm.primary.spec import KVTierSpec  # noqa: E402
from kvtier.engines.vllm.secondary import KVTierFs, KVTierSharedFs  # noqa: E402

__all__ = ["KVTierConnector", "KVTierFs", "KVTierSharedFs", "KVTierSpec"]

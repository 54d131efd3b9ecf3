"""The former place of `kvtier.engines`."""

raise ImportError(
    "kvtier.integrations is kvtier.engines now; kvtier.engines.vllm, for example, is the connector for vLLM"
)

"""`KVTierSpec`: a stack below vLLM's OffloadingConnector."""

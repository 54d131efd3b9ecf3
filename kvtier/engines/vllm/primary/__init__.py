"""`KVTierSpec`: a stack below vLLM's OffloadingConnector, owned by the scheduler; workers copy their own blocks."""

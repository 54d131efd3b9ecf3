"""`KVTierFs`: a disk tier below vLLM's own CPU tier."""

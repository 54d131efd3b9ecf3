"""Policy `reuse`: its statistics of which blocks come back, its order of eviction and its admission."""

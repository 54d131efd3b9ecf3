"""Policy `reuse`: which blocks come back, learned from the requests; its order of eviction and its admission."""

"""Policy `reuse`: learns from requests which blocks come back; its model, its order of eviction, its admission."""

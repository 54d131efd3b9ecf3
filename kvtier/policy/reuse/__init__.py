"""Policy `reuse`: order of eviction, victims chosen ahead, admission; called by the plane alone."""

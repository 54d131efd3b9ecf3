"""Policy `reuse`: order of eviction, admission, journal of its calls; called by the plane alone."""

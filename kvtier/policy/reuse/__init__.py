"""Policy `reuse`: order of eviction, admission, journal of its calls; called by the plane, by the loop under a lock."""

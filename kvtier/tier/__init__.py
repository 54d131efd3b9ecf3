"""Contract between stack and tiers, and parts for backends: jobs, envelopes, epochs, ages, limits; no stack's state."""

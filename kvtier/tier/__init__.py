"""The contract between stack and tiers: all that a tier's author reads; holds no state of a stack."""

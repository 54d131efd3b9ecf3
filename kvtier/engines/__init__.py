"""Adapters, a package for each engine, which only it imports; digests and releases for all; no room imports them."""

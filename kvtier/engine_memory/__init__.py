"""Verified lower tiers below the memory of another engine, which keeps its own CPU tier.

The engine names rows of its memory and keys. Every block passes through aligned memory of kvtier, where its checksum
is computed or verified. Directory, slots, eviction and health of the tier are those of `kvtier.control`. An engine is
imported in its integration only.
"""

"""Attacks on tiers whose blocks are on a server: the servers, and the hosts that use them."""

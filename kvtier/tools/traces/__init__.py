"""Traces by other tools converted into ours, and what a trace holds, in figures."""

"""Adapters of engines, one package for each, and their shared parts; each imports its engine and the stack's faces."""

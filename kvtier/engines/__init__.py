"""Adapters of engines: one package for each, and what they share. An engine is imported only in its own."""

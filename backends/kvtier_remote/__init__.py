"""Tiers on servers, a room for each; names, values, answers for all; touch their prefix and the rows of their jobs."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtier_remote.mooncake.options import MooncakeOptions
    from kvtier_remote.mooncake.tier import MooncakeBackend
    from kvtier_remote.objects.options import AzureOptions, GCSOptions, S3Options
    from kvtier_remote.objects.tier import AzureBackend, GCSBackend, S3Backend
    from kvtier_remote.valkey.options import ValkeyOptions
    from kvtier_remote.valkey.tier import ValkeyBackend

__all__ = [
    "AzureBackend",
    "AzureOptions",
    "GCSBackend",
    "GCSOptions",
    "MooncakeBackend",
    "MooncakeOptions",
    "S3Backend",
    "S3Options",
    "ValkeyBackend",
    "ValkeyOptions",
]

if not TYPE_CHECKING:
    _ROOMS = {"Mooncake": "mooncake", "Valkey": "valkey"}

    def __getattr__(name: str) -> object:
        """A tier or its options, loaded at its first use: a stack with one engine does not load the others."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        kind = "tier" if name.endswith("Backend") else "options"
        room = _ROOMS.get(name.removesuffix("Backend").removesuffix("Options"), "objects")
        return getattr(import_module(f"kvtier_remote.{room}.{kind}"), name)

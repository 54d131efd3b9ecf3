"""Remote tiers of kvtier: blocks on servers and in buckets that many processes share."""

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

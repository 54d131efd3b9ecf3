"""Keep prefixes of Hugging Face `DynamicCache` objects in a tier stack, from a generation loop of your own.

Imports without transformers; opening a prefix cache needs it and says so.
"""

from kvtier.integrations.transformers.blocking import PrefixCache
from kvtier.integrations.transformers.prefix import AsyncPrefixCache

__all__ = ["AsyncPrefixCache", "PrefixCache"]

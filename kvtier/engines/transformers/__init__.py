"""Keep prefixes of Hugging Face `DynamicCache` objects in a tier stack, from a generation loop of your own.

Can be imported without transformers. Opening a prefix cache without it raises ConfigError.
"""

from kvtier.engines.transformers.compat import cache_argument
from kvtier.engines.transformers.prefix_cache import AsyncPrefixCache, PrefixCache

__all__ = ["AsyncPrefixCache", "PrefixCache", "cache_argument"]

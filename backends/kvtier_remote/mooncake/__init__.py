"""The tier `mooncake`: blocks in the pool of memory of a Mooncake store."""

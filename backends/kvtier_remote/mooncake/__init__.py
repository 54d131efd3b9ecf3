"""The tier `mooncake`: blocks in the pool of a Mooncake store, touched through clients in processes of their own."""

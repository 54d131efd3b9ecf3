"""Building blocks for asyncio and threads, without KV blocks; any room may use them."""

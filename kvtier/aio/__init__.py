"""Building blocks for asyncio and threads that know nothing of KV blocks."""

"""The tier `valkey`: blocks on a Valkey or Redis server."""

"""The tier `valkey`: blocks on a Valkey or Redis server; touches names below its prefix, a client in each thread."""

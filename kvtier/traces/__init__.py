"""Request traces: reading them."""

"""Authentication: API keys, their records, and the headers that carry them."""

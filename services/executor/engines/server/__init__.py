"""Engines behind a URL: servers that take token ids and give token ids."""

"""Bugs that were mended, as small patches of the running services: what the search must find again."""

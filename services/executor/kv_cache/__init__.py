"""Paged KV cache: one allocator for the whole ring, one store of its own heads per rank."""

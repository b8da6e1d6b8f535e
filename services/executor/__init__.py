"""Compute and memory of one group: a tensor-parallel ring of ranks and its KV cache."""

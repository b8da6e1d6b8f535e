"""Sampling by (seed, position) for vLLM: see `processor`."""

"""The trainer: examples in, an adapter out, step by step, the same after any interruption."""

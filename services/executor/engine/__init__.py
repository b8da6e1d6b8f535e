"""Continuous batching, step plans, sampling, and the engines that execute the plans."""

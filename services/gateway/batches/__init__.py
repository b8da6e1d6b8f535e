"""Batches under a lease: their files, lines, states and results."""

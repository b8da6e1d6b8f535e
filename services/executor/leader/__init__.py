"""Rank 0's event loop: requests from NATS, step after step, tokens published."""
